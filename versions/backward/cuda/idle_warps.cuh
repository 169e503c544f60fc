// What the idle warps of the producer's warpgroup have to work with.
#pragma once
#include "padded_pass.cuh"
#include "ptx/memory_order.cuh"
#include "ptx/sm90.cuh"

constexpr int idle_warps = 3;  // the warpgroup's first warp loads tiles

// A place for 4 KB, of a warp.
struct alignas(16) Slice {
    float place[1024];
    Mbarrier full;
};

// How many rows the heads have that share a head of K, with the padding.
__device__ inline int padded_rows_of_group(const BackwardParams &p) {
    return padded_row(p, 0, p.num_heads / p.num_heads_k, 0);
}

// lane_index(), read anew each time: the compiler keeps nothing that follows from it in registers, of which there are few.
__device__ inline int lane_index_anew() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}
