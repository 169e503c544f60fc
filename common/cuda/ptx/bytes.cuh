// Four bytes in a register.
#pragma once
#include <stdint.h>

// Two bytes each of two words, at the places that the selector names: 0xff where a byte's top bit is set, else 0.
__device__ inline uint32_t spread_signs(uint32_t low, uint32_t high, uint32_t selector) {
    uint32_t spread;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(spread) : "r"(low), "r"(high), "r"(selector));
    return spread;
}
