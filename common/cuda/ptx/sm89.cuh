// Instructions that came with Ada. Names follow the PTX ISA.
#pragma once
#include <stdint.h>

// Two of four 8-bit floats, e4m3, as two f16: every one of them is an f16.
__device__ inline uint32_t e4m3x2_to_f16x2(uint32_t four, int half) {
    uint32_t halves;
    if (half == 0)
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}" : "=r"(halves) : "r"(four));
    else
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}" : "=r"(halves) : "r"(four));
    return halves;
}
