// The first pass within the loop's kernel, for heads that come later: a warp has slices of a few rows brought to shared
// memory, row by row.
#pragma once
#include "idle_warps.cuh"

constexpr int slice_rows = 1024 / config::head_dim;  // O and dO fill the place

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

// Prepares one of `shares` shares of the rows of the heads from `first_head` on. All lanes of one of the idle warps call it.
__device__ inline void prepare_ahead(const BackwardParams &p, const PaddedWorkspaces &workspaces, Slice &slice, uint32_t &parity,
                                     int warp, int batch, int first_head, int share, int shares) {
    constexpr int lanes = 32 / slice_rows;  // that share a row
    constexpr int pairs = config::head_dim / 4;
    const int rows_of_head = padded_row(p, 0, 1, 0), slices = padded_rows_of_group(p) / slice_rows;
    const int each = (slices + shares - 1) / shares, end = min(slices, (share + 1) * each);
    config::dtype(*const o)[config::head_dim] = reinterpret_cast<config::dtype(*)[config::head_dim]>(slice.place);
    config::dtype(*const dout)[config::head_dim] = o + slice_rows;

#pragma unroll 1
    for (int number = share * each + warp; number < end; number += idle_warps, parity ^= 1) {
        const int lane = lane_index_anew(), in_slice = lane / lanes, part = lane % lanes;
        const int head = first_head + number * slice_rows / rows_of_head, row = number * slice_rows % rows_of_head + in_slice;
        const bool is_row = row < p.seqlen_q;

        // O and dO, a row of one a lane
        if (lane == 0) slice.full.arrive_expecting(min(slice_rows, max(p.seqlen_q - row, 0)) * 2 * sizeof o[0]);
        __syncwarp();
        if (is_row && part < 2) {
            const config::dtype *from = part ? head_of(p.dout, p.dout_stride, batch, head) + row * p.dout_stride.row
                                             : head_of(p.o, p.o_stride, batch, head) + row * p.o_stride.row;
            bulk_load(part ? dout[in_slice] : o[in_slice], from, sizeof o[0], slice.full);
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
            if (is_row) sum += dot_four(o[in_slice] + col, dout[in_slice] + col);
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
