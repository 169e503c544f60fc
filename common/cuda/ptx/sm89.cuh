// Instructions that came with Ada, and what Ampere has in their place. Names follow the PTX ISA.
#pragma once
#include <cuda_fp16.h>
#include <stdint.h>

// Two of four 8-bit floats, e4m3, as two f16: every one of them is an f16.
__device__ inline uint32_t e4m3x2_to_f16x2(uint32_t four, int half) {
    uint32_t halves;
#if __CUDA_ARCH__ < 890
    // As bits of an f16, exponent and fraction are a 2^8th of the number, which takes one exact product. NaN is 480 then.
    const uint32_t two = __byte_perm(four, 0, half == 0 ? 0x1404 : 0x3424), small = two >> 1 & 0x3f803f80;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(small), "r"(0x5c005c00));
    return halves | (two & 0x80008000) | (__vcmpeq2(small, 0x3f803f80) & 0x7e007e00);
#else
    if (half == 0)
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}" : "=r"(halves) : "r"(four));
    else
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}" : "=r"(halves) : "r"(four));
    return halves;
#endif
}

// The nearest e4m3, which is 448 for what is beyond that; NaN stays.
__device__ inline uint8_t f32_to_e4m3(float x) {
    uint16_t two;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.0f), "f"(x));
    return static_cast<uint8_t>(two);
}
