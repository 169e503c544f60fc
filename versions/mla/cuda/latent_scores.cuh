// Scores of a block of latents of any width that is a multiple of 16 columns.
#pragma once
#include "latent_ring.cuh"

// S = Q K^T of a block, each panel as soon as it has come. The last panel may be half full.
template <class T, int block_n, class QTile, class KVTile, class Ring>
__device__ inline void start_scores(Accumulator<16, block_n> &s, const ByRows<QTile> &q, const ByRows<KVTile> &k, Ring &ring,
                                    const typename Ring::State &at) {
    constexpr int whole = KVTile::cols / 64, rest = KVTile::cols % 64;
#pragma unroll
    for (int panel = 0; panel < whole; ++panel) {
        ring.wait(at, panel);
        start_product<T, 64>(s, panel_of(q, panel), panel_of(k.after(at.stage), panel), panel > 0);
    }
    if constexpr (rest > 0) {
        ring.wait(at, whole);
        start_product<T, rest>(s, panel_of(q, whole), panel_of(k.after(at.stage), whole), true);
    }
}
