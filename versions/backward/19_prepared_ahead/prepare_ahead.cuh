// The first pass within the loop's kernel: idle warps do it for heads that come later. Each has slices of a few rows
// brought to shared memory, row by row, and tells through a counter when they are done.
#pragma once
#include "padded_pass.cuh"
#include "ptx/memory_order.cuh"
#include "ptx/sm90.cuh"

struct AheadWorkspaces : PaddedWorkspaces {
    unsigned *ready;  // how many warps are done with their shares of the rows of a head of K
};
FLASHLADDER_COUNTERS(ready, "batch * num_heads_k");

constexpr int idle_warps = 3;  // of the producer's warpgroup, whose first warp loads tiles
constexpr int slice_rows = 1024 / config::head_dim;  // so that O and dO take 4 KB

// Of a warp.
struct alignas(16) Slice {
    config::dtype o[slice_rows][config::head_dim], dout[slice_rows][config::head_dim];
    Mbarrier full;
};

// The product of four elements with four others, summed.
__device__ inline float dot_four(const config::dtype *a, const config::dtype *b) {
    const uint2 a_bits = *reinterpret_cast<const uint2 *>(a), b_bits = *reinterpret_cast<const uint2 *>(b);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        sum += static_cast<float>(reinterpret_cast<const config::dtype *>(&a_bits)[i]) *
               static_cast<float>(reinterpret_cast<const config::dtype *>(&b_bits)[i]);
    return sum;
}

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

// Prepares one of `shares` shares of the rows of the heads from `first_head` on. All lanes of one of the idle warps call it.
__device__ inline void prepare_ahead(const BackwardParams &p, const PaddedWorkspaces &workspaces, Slice &slice, int warp,
                                     int batch, int first_head, int share, int shares) {
    constexpr int lanes = 32 / slice_rows;  // that share a row
    constexpr int pairs = config::head_dim / 4;
    const int rows_of_head = padded_row(p, 0, 1, 0), slices = padded_rows_of_group(p) / slice_rows;
    const int each = (slices + shares - 1) / shares, end = min(slices, (share + 1) * each);
    uint32_t parity = 0;

#pragma unroll 1
    for (int number = share * each + warp; number < end; number += idle_warps, parity ^= 1) {
        const int lane = lane_index_anew(), in_slice = lane / lanes, part = lane % lanes;
        const int head = first_head + number * slice_rows / rows_of_head, row = number * slice_rows % rows_of_head + in_slice;
        const bool is_row = row < p.seqlen_q;

        // O and dO, a row of one a lane
        if (lane == 0) slice.full.arrive_expecting(min(slice_rows, max(p.seqlen_q - row, 0)) * 2 * sizeof slice.o[0]);
        __syncwarp();
        if (is_row && part < 2) {
            const config::dtype *from = part ? head_of(p.dout, p.dout_stride, batch, head) + row * p.dout_stride.row
                                             : head_of(p.o, p.o_stride, batch, head) + row * p.o_stride.row;
            bulk_load(part ? slice.dout[in_slice] : slice.o[in_slice], from, sizeof slice.o[0], slice.full);
        }

        const long long padded = padded_row(p, batch, head, 0) + row;
        float4 *dq = reinterpret_cast<float4 *>(workspaces.dq_sum + (padded - in_slice) * config::head_dim) + lane;
#pragma unroll 1
        for (int i = 0; i < slice_rows * config::head_dim / 4; i += 32) dq[i] = {};

        float sum = 0.0f;
        slice.full.wait(parity);
#pragma unroll 1
        for (int i = part; i < pairs; i += lanes) {
            const int col = (i ^ in_slice) * 4;  // rows in other banks
            if (is_row) sum += dot_four(slice.o[in_slice] + col, slice.dout[in_slice] + col);
        }
#pragma unroll
        for (int other = lanes / 2; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffff, sum, other);
        if (part == 0) {
            const float lse = is_row ? p.lse[(static_cast<long long>(batch) * p.num_heads + head) * p.seqlen_q + row] : -INFINITY;
            workspaces.delta[padded] = sum;
            workspaces.lse[padded] = lse == -INFINITY ? INFINITY : lse * log2_e;
        }
        fence_proxy_async();
        __syncwarp();  // every lane has read the slice
    }
}
