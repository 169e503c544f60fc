// Instructions that came with Ada. Names follow the PTX ISA.
#pragma once
#include <stdint.h>

// Two 8-bit floats, e4m3, in the lower half of `pair`, as two f16: every one of them is an f16.
__device__ inline uint32_t e4m3x2_to_f16x2(uint32_t pair) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
    return halves;
}
