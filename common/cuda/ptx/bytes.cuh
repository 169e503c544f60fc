// Four bytes in a register.
#pragma once
#include <stdint.h>

// Two bytes each of two words, at the places that the selector names: 0xff where a byte's top bit is set, else 0.
__device__ inline uint32_t spread_signs(uint32_t low, uint32_t high, uint32_t selector) {
    uint32_t spread;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(spread) : "r"(low), "r"(high), "r"(selector));
    return spread;
}

// Bit by bit: a, or where a and b are equal c. One instruction, which the compiler does not find.
__device__ inline uint32_t where_equal(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t chosen;
    asm("lop3.b32 %0, %1, %2, %3, 0xb2;" : "=r"(chosen) : "r"(a), "r"(b), "r"(c));  // (a & ~b) | (~(a ^ b) & c)
    return chosen;
}
