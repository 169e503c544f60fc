// Sums in global memory; sm_90.
#pragma once

// Adds four floats to those in global memory, one by one.
__device__ inline void add_global_16(float4 *global, const float (&x)[4]) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
}
