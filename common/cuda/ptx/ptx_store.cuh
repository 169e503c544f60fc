// Stores, one function per instruction; names follow the PTX ISA.
#pragma once
#include <stdint.h>

// The other way round than ldmatrix_x4: four 8 x 8 blocks of 16-bit elements to shared memory. sm_90.
__device__ inline void stmatrix_x4(uint32_t shared, const uint32_t (&block)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(block[0]),
                 "r"(block[1]), "r"(block[2]), "r"(block[3])
                 : "memory");
}

// Stores a float if it is `wanted`, without a branch.
__device__ inline void store_global_4_if(bool wanted, float *global, float value) {
    asm volatile("{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %2, 0;\n@wanted st.global.f32 [%0], %1;\n}" ::"l"(global),
                 "f"(value), "r"(static_cast<int>(wanted))
                 : "memory");
}
