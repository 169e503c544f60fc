// From global to shared memory through registers: loads are on their way while what came before is used.
#pragma once
#include <stdint.h>

// 16 bytes of what no kernel writes meanwhile, without a place in L1; or zeros if not `readable`, and nothing is read then.
__device__ inline uint4 load_global_16_or_zeros(const void *global, bool readable) {
    uint4 value;
    asm volatile("{\n.reg .pred readable;\nsetp.ne.b32 readable, %5, 0;\n"
                 "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
                 "@readable ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
                 : "=&r"(value.x), "=&r"(value.y), "=&r"(value.z), "=&r"(value.w)
                 : "l"(global), "r"(static_cast<int>(readable)));
    return value;
}

// A plain assignment of a uint4 is sometimes split into four stores.
__device__ inline void store_shared_16(uint32_t shared, uint4 value) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}

// Keeps the compiler from working out what follows from a number before this place, which takes registers of its own.
__device__ inline void keep_in_place(int &x) { asm volatile("" : "+r"(x)); }
