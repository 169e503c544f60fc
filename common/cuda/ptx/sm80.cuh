// One function per instruction, and nothing clever. Names follow the PTX ISA.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

__device__ inline uint32_t shared_address(const void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Starts a 16-byte copy from global to shared memory; the L2 cache fetches the whole 128-byte line.
__device__ inline void cp_async_16(uint32_t shared, const void *global) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// The same, or 16 zero bytes if not `readable`. Nothing is read then, so `global` may be any address.
__device__ inline void cp_async_16_or_zeros(uint32_t shared, const void *global, bool readable) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
                 "r"(readable ? 16 : 0)
                 : "memory");
}

// A 4-byte copy, or 4 zero bytes.
__device__ inline void cp_async_4_or_zeros(uint32_t shared, const void *global, bool readable) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(readable ? 4 : 0)
                 : "memory");
}

// Closes the group of copies that this thread has started.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` of this thread's latest groups are still under way.
template <int pending>
__device__ inline void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Loads four 8 x 8 blocks of 16-bit elements. Lane l gives the address of row l % 8 of block l / 8. It receives the
// elements (l / 4, 2 * (l % 4)) and (l / 4, 2 * (l % 4) + 1) of every block.
__device__ inline void ldmatrix_x4(uint32_t (&block)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(block[0]), "=r"(block[1]), "=r"(block[2]), "=r"(block[3])
                 : "r"(shared)
                 : "memory");
}

// The same; every block is transposed on its way.
__device__ inline void ldmatrix_x4_trans(uint32_t (&block)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(block[0]), "=r"(block[1]), "=r"(block[2]), "=r"(block[3])
                 : "r"(shared)
                 : "memory");
}

// C += A B for A 16 x 16, B 16 x 8 and C 16 x 8, 16-bit inputs and fp32 sums.
template <class T>
__device__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ inline void mma_m16n8k16<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ inline void mma_m16n8k16<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rounds two floats to 16 bits and packs them, `low` in the lower half.
template <class T>
__device__ uint32_t pack(float low, float high);

template <>
__device__ inline uint32_t pack<__nv_bfloat16>(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

template <>
__device__ inline uint32_t pack<__half>(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// 2^x, on the special-function unit.
__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x, on the same unit.
__device__ inline float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline void store_shared_4(uint32_t shared, uint32_t value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(value) : "memory");
}

__device__ inline uint4 load_shared_16(uint32_t shared) {
    uint4 value;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(shared)
                 : "memory");
    return value;
}

// Stores 16 bytes; a plain assignment of a uint4 is sometimes split into four stores.
__device__ inline void store_global_16(void *global, uint4 value) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}

// Stores 16 bytes without taking a place in L1.
__device__ inline void store_global_16_no_allocate(void *global, uint4 value) {
    asm volatile("st.global.L1::no_allocate.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(value.x), "r"(value.y),
                 "r"(value.z), "r"(value.w)
                 : "memory");
}

// Keeps the compiler from working two pointers out anew from where a loop began, which would take registers of their own.
template <class T>
__device__ inline void keep_in_place(const T *&a, const T *&b) {
    asm volatile("" : "+l"(a), "+l"(b));
}

// blockIdx, read anew each time: the compiler does not keep what it was in registers.
__device__ inline uint3 cta_index() {
    uint3 cta;
    asm volatile("mov.u32 %0, %%ctaid.x;\nmov.u32 %1, %%ctaid.y;\nmov.u32 %2, %%ctaid.z;"
                 : "=r"(cta.x), "=r"(cta.y), "=r"(cta.z));
    return cta;
}
