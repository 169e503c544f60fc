// Dropout where scores come from wgmma: the mask of a block depends on places alone, so a warp draws it before S is there.
#pragma once
#include "ptx/wgmma.cuh"
#include "schedule/packed.cuh"
#include "schedule/work_tile.cuh"
#include "softmax/dropout.cuh"

// What a warp keeps of its 16 rows of P. Without dropout it is nothing.
template <bool dropout, int cols>
struct DrawnMask {
    static_assert(!dropout || cols % 32 == 0, "squares are drawn two by two");
    KeptPairs<false> pairs[cols / 32];

    // To be called between the start of S and the wait for it. ptxas moves it beyond either unless a loop lies between,
    // such as a wait for an mbarrier.
    __device__ DrawnMask(const Dropout<dropout> &of, int first_row, int first_key) {
        if constexpr (dropout) {
#pragma unroll
            for (int n = 0; n < cols / 32; ++n) {
                pairs[n] = of.template draw<false, 16>(first_row, 0, first_key + n * 32);
#pragma unroll
                for (int word = 0; word < 4; ++word) stay_here(pairs[n].words[word / 2][word % 2]);
            }
        }
    }

    // Weights that are dropped become zero.
    __device__ void drop(HeldA<16, cols> &p) const {
        if constexpr (dropout) {
#pragma unroll
            for (int step = 0; step < cols / 16; ++step)
#pragma unroll
                for (int i = 0; i < 4; ++i) p.block[step][0][i] &= pairs[step / 2].mask(step % 2, i);
        }
    }
};

// The number of a work tile's sequence in the batch.
__device__ inline int sequence_of(const AttentionParams &, const WorkTileReader &work) { return work.get(&WorkTile::batch_q); }

// Of packed sequences, which has rows: as many others begin at its first row or before.
__device__ inline int sequence_of(const PackedParams &params, const WorkTileReader &work) {
    const int begin = work.get(&WorkTile::batch_q) - work.get(&WorkTile::seqlen_q);
    int others = 0;
    for (int b = lane_index() + 1; b < params.batch; b += 32) others += __ldg(params.cu_seqlens_q + b) <= begin;
    return __reduce_add_sync(0xffffffff, others);
}
