// Matrix products of a warpgroup (128 threads, their first warp a multiple of 4), one function per instruction; sm_90a.
// PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate". Names follow it.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

// Before the first product, and after each write of ordinary code to a register that the next product reads or sums in.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes the group of products that this warp has started.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `pending` of this warp's latest groups are still under way.
template <int pending>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keeps the compiler from moving a use of a register across this place: it does not know that products run on.
__device__ inline void stay_here(float &x) { asm volatile("" : "+f"(x)::"memory"); }
__device__ inline void stay_here(uint32_t &x) { asm volatile("" : "+r"(x)::"memory"); }
__device__ inline void stay_here(uint64_t &x) { asm volatile("" : "+l"(x)::"memory"); }

// D = A B, or D += A B where `adds`. D is 64 x n floats: warp w of the group has rows from 16 * w on, as accumulators of
// 16 x 8 (layout.cuh). B is 16 x n in shared memory, given by its descriptor.
//   of_shared:     A is 64 x 16 in shared memory.
//   of_registers:  A is 16 x 16 a warp, as mma.sync has it.
// An operand in shared memory has the 16 of k side by side (K of Q K^T), or `by_columns` apart (V of P V).
template <class T, int n>
struct Wgmma;

#define FLASHLADDER_BLOCK(b) "+f"(d[b][0]), "+f"(d[b][1]), "+f"(d[b][2]), "+f"(d[b][3])
#define FLASHLADDER_BLOCKS_1(b) FLASHLADDER_BLOCK(b)
#define FLASHLADDER_BLOCKS_2(b) FLASHLADDER_BLOCK(b), FLASHLADDER_BLOCK(b + 1)
#define FLASHLADDER_BLOCKS_4(b) \
    FLASHLADDER_BLOCK(b), FLASHLADDER_BLOCK(b + 1), FLASHLADDER_BLOCK(b + 2), FLASHLADDER_BLOCK(b + 3)
#define FLASHLADDER_BLOCKS_6(b) FLASHLADDER_BLOCKS_4(b), FLASHLADDER_BLOCKS_2(b + 4)
#define FLASHLADDER_BLOCKS_8(b) FLASHLADDER_BLOCKS_4(b), FLASHLADDER_BLOCKS_4(b + 4)
#define FLASHLADDER_BLOCKS_9(b) FLASHLADDER_BLOCKS_8(b), FLASHLADDER_BLOCK(b + 8)
#define FLASHLADDER_BLOCKS_10(b) FLASHLADDER_BLOCKS_8(b), FLASHLADDER_BLOCKS_2(b + 8)
#define FLASHLADDER_BLOCKS_12(b) FLASHLADDER_BLOCKS_8(b), FLASHLADDER_BLOCKS_4(b + 8)
#define FLASHLADDER_BLOCKS_13(b) FLASHLADDER_BLOCKS_12(b), FLASHLADDER_BLOCK(b + 12)
#define FLASHLADDER_BLOCKS_14(b) FLASHLADDER_BLOCKS_12(b), FLASHLADDER_BLOCKS_2(b + 12)
#define FLASHLADDER_BLOCKS_16(b) FLASHLADDER_BLOCKS_8(b), FLASHLADDER_BLOCKS_8(b + 8)
#define FLASHLADDER_BLOCKS_17(b) FLASHLADDER_BLOCKS_16(b), FLASHLADDER_BLOCK(b + 16)
#define FLASHLADDER_BLOCKS_24(b) FLASHLADDER_BLOCKS_16(b), FLASHLADDER_BLOCKS_8(b + 16)
#define FLASHLADDER_BLOCKS_25(b) FLASHLADDER_BLOCKS_24(b), FLASHLADDER_BLOCK(b + 24)
#define FLASHLADDER_BLOCKS_32(b) FLASHLADDER_BLOCKS_16(b), FLASHLADDER_BLOCKS_16(b + 16)
#define FLASHLADDER_D_4 "%0, %1, %2, %3"
#define FLASHLADDER_D_8 FLASHLADDER_D_4 ", %4, %5, %6, %7"
#define FLASHLADDER_D_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FLASHLADDER_D_24 FLASHLADDER_D_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FLASHLADDER_D_32 \
    FLASHLADDER_D_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FLASHLADDER_D_36 FLASHLADDER_D_32 ", %32, %33, %34, %35"
#define FLASHLADDER_D_40 FLASHLADDER_D_36 ", %36, %37, %38, %39"
#define FLASHLADDER_D_48 \
    FLASHLADDER_D_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FLASHLADDER_D_52 FLASHLADDER_D_48 ", %48, %49, %50, %51"
#define FLASHLADDER_D_56 FLASHLADDER_D_52 ", %52, %53, %54, %55"
#define FLASHLADDER_D_64 \
    FLASHLADDER_D_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FLASHLADDER_D_68 FLASHLADDER_D_64 ", %64, %65, %66, %67"
#define FLASHLADDER_D_96 \
    FLASHLADDER_D_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
                     ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FLASHLADDER_D_100 FLASHLADDER_D_96 ", %96, %97, %98, %99"
#define FLASHLADDER_D_128 \
    FLASHLADDER_D_100 ", %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
                      ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// i0..i6 are the numbers of the operands after D.
#define FLASHLADDER_WGMMA(T, type, n, D, BLOCKS, i0, i1, i2, i3, i4, i5, i6) \
    template <> \
    struct Wgmma<T, n> { \
        template <bool a_by_columns, bool b_by_columns> \
        __device__ static void of_shared(float (&d)[n / 8][4], uint64_t a, uint64_t b, bool adds) { \
            asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #i2 ", 0;\n" \
                         "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" D "}, %" #i0 ", %" #i1 \
                         ", adds, 1, 1, %" #i3 ", %" #i4 ";\n}" \
                         : BLOCKS(0) \
                         : "l"(a), "l"(b), "r"(static_cast<int>(adds)), "n"(static_cast<int>(a_by_columns)), \
                           "n"(static_cast<int>(b_by_columns))); \
        } \
        template <bool by_columns> \
        __device__ static void of_registers(float (&d)[n / 8][4], const uint32_t (&a)[4], uint64_t b, bool adds) { \
            asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #i5 ", 0;\n" \
                         "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" D "}, {%" #i0 ", %" #i1 \
                         ", %" #i2 ", %" #i3 "}, %" #i4 ", adds, 1, 1, %" #i6 ";\n}" \
                         : BLOCKS(0) \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)), \
                           "n"(static_cast<int>(by_columns))); \
        } \
    }
#define FLASHLADDER_WGMMAS(n, D, BLOCKS, ...) \
    FLASHLADDER_WGMMA(__nv_bfloat16, "bf16", n, D, BLOCKS, __VA_ARGS__); \
    FLASHLADDER_WGMMA(__half, "f16", n, D, BLOCKS, __VA_ARGS__)

FLASHLADDER_WGMMAS(8, FLASHLADDER_D_4, FLASHLADDER_BLOCKS_1, 4, 5, 6, 7, 8, 9, 10);
FLASHLADDER_WGMMAS(16, FLASHLADDER_D_8, FLASHLADDER_BLOCKS_2, 8, 9, 10, 11, 12, 13, 14);
FLASHLADDER_WGMMAS(32, FLASHLADDER_D_16, FLASHLADDER_BLOCKS_4, 16, 17, 18, 19, 20, 21, 22);
FLASHLADDER_WGMMAS(48, FLASHLADDER_D_24, FLASHLADDER_BLOCKS_6, 24, 25, 26, 27, 28, 29, 30);
FLASHLADDER_WGMMAS(64, FLASHLADDER_D_32, FLASHLADDER_BLOCKS_8, 32, 33, 34, 35, 36, 37, 38);
FLASHLADDER_WGMMAS(72, FLASHLADDER_D_36, FLASHLADDER_BLOCKS_9, 36, 37, 38, 39, 40, 41, 42);
FLASHLADDER_WGMMAS(80, FLASHLADDER_D_40, FLASHLADDER_BLOCKS_10, 40, 41, 42, 43, 44, 45, 46);
FLASHLADDER_WGMMAS(96, FLASHLADDER_D_48, FLASHLADDER_BLOCKS_12, 48, 49, 50, 51, 52, 53, 54);
FLASHLADDER_WGMMAS(104, FLASHLADDER_D_52, FLASHLADDER_BLOCKS_13, 52, 53, 54, 55, 56, 57, 58);
FLASHLADDER_WGMMAS(112, FLASHLADDER_D_56, FLASHLADDER_BLOCKS_14, 56, 57, 58, 59, 60, 61, 62);
FLASHLADDER_WGMMAS(128, FLASHLADDER_D_64, FLASHLADDER_BLOCKS_16, 64, 65, 66, 67, 68, 69, 70);
FLASHLADDER_WGMMAS(136, FLASHLADDER_D_68, FLASHLADDER_BLOCKS_17, 68, 69, 70, 71, 72, 73, 74);
FLASHLADDER_WGMMAS(192, FLASHLADDER_D_96, FLASHLADDER_BLOCKS_24, 96, 97, 98, 99, 100, 101, 102);
FLASHLADDER_WGMMAS(200, FLASHLADDER_D_100, FLASHLADDER_BLOCKS_25, 100, 101, 102, 103, 104, 105, 106);
FLASHLADDER_WGMMAS(256, FLASHLADDER_D_128, FLASHLADDER_BLOCKS_32, 128, 129, 130, 131, 132, 133, 134);

#undef FLASHLADDER_WGMMAS
#undef FLASHLADDER_WGMMA
#undef FLASHLADDER_D_128
#undef FLASHLADDER_D_100
#undef FLASHLADDER_D_96
#undef FLASHLADDER_D_68
#undef FLASHLADDER_D_64
#undef FLASHLADDER_D_56
#undef FLASHLADDER_D_52
#undef FLASHLADDER_D_48
#undef FLASHLADDER_D_40
#undef FLASHLADDER_D_36
#undef FLASHLADDER_D_32
#undef FLASHLADDER_D_24
#undef FLASHLADDER_D_16
#undef FLASHLADDER_D_8
#undef FLASHLADDER_D_4
#undef FLASHLADDER_BLOCKS_32
#undef FLASHLADDER_BLOCKS_25
#undef FLASHLADDER_BLOCKS_24
#undef FLASHLADDER_BLOCKS_17
#undef FLASHLADDER_BLOCKS_16
#undef FLASHLADDER_BLOCKS_14
#undef FLASHLADDER_BLOCKS_13
#undef FLASHLADDER_BLOCKS_12
#undef FLASHLADDER_BLOCKS_10
#undef FLASHLADDER_BLOCKS_9
#undef FLASHLADDER_BLOCKS_8
#undef FLASHLADDER_BLOCKS_6
#undef FLASHLADDER_BLOCKS_4
#undef FLASHLADDER_BLOCKS_2
#undef FLASHLADDER_BLOCKS_1
#undef FLASHLADDER_BLOCK
