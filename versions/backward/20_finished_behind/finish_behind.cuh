// The last pass within the loop's kernel, for heads that all CTAs are done with: a warp has the 4 KB that one warp of the
// loop adds to brought to shared memory, and stores them as dQ.
#pragma once
#include "idle_warps.cuh"
#include "warpgroup_tiles.cuh"

// Puts x in the place of the value whose number differs from its own in the bits of `flip`.
__device__ inline void exchange(uint32_t (&x)[4], int flip) {
    const uint32_t a[4] = {flip & 1 ? x[1] : x[0], flip & 1 ? x[0] : x[1], flip & 1 ? x[3] : x[2], flip & 1 ? x[2] : x[3]};
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = flip & 2 ? a[i ^ 2] : a[i];
}

// Finishes one of `shares` shares of dQ of the heads from `first_head` on. All lanes of one of the idle warps call it.
__device__ inline void finish_behind(const BackwardParams &p, const PaddedWorkspaces &workspaces, Slice &slice,
                                     uint32_t &parity, int warp, int batch, int first_head, int share, int shares) {
    constexpr int warps = num_groups * 4;
    const int tiles_of_head = padded_row(p, 0, 1, 0) / config::block_m, parts = padded_rows_of_group(p) / config::block_m * warps;
    const int each = (parts + shares - 1) / shares, end = min(parts, (share + 1) * each);

#pragma unroll 1
    for (int number = share * each + warp; number < end; number += idle_warps, parity ^= 1) {
        const int lane = lane_index_anew(), tile = number / warps;
        const DqPart part{number % warps / 4};
        const int head = first_head + tile / tiles_of_head;
        const int first_row = tile % tiles_of_head * config::block_m + part.row + number % 4 * 16;

        if (lane == 0) {
            slice.full.arrive_expecting(sizeof slice.place);
            bulk_load(slice.place, workspaces.dq_sum + padded_row(p, batch, first_head, 0) * config::head_dim + number * 1024,
                      sizeof slice.place, slice.full);
        }
        slice.full.wait(parity);

        // Eight lanes have a row, 16 bytes each: the sums of four lanes, of this row and of the eighth below. They read them
        // in different orders, from different banks.
        const int block = lane % 8;
#pragma unroll 1
        for (int in_block = lane / 8; in_block < 8; in_block += 4) {
            uint32_t above[4], below[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float4 x = reinterpret_cast<float4 *>(slice.place)[block * 32 + in_block * 4 + (i ^ block % 4)];
                above[i] = pack<config::dtype>(x.x * p.softmax_scale, x.y * p.softmax_scale);
                below[i] = pack<config::dtype>(x.z * p.softmax_scale, x.w * p.softmax_scale);
            }
            exchange(above, block);
            exchange(below, block);
            const int row = first_row + in_block;
            config::dtype *dq = head_of(p.dq, p.dq_stride, batch, head) + row * p.dq_stride.row + part.col + block * 8;
            if (row < p.seqlen_q) store_global_16(dq, {above[0], above[1], above[2], above[3]});
            if (row + 8 < p.seqlen_q)
                store_global_16(dq + 8 * p.dq_stride.row, {below[0], below[1], below[2], below[3]});
        }
        fence_proxy_async();
        __syncwarp();  // every lane has read the slice
    }
}
