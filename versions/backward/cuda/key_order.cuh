// In which order tiles of keys are added to a tile of Q, if `deterministic`. CTAs are launched in the same order, so that each waits
// for CTAs that were launched before it. These end whatever comes behind them, on any number of SMs.
#pragma once
#include "around_loop.cuh"
#include "turns.cuh"

#include <type_traits>

// From the last keys, and each CTA goes from the first rows that see its keys up to the last ones: under a causal mask nobody adds
// to those before, and who comes behind is as many rows away as a tile has keys. From the first keys and the last rows, all CTAs
// begin at the same rows, and wait. But the longest CTAs are then launched first, which counts for more where CTAs have groups of
// heads: these are few, and a step of a tile takes one for each head.
__device__ inline bool from_last_keys(const Params &p) { return config::deterministic && p.num_heads == p.num_heads_k; }

// How many tiles of keys are added before this one.
__device__ inline int tiles_before(const Params &p, const Mask &mask, int key_tile, int query_tile) {
    if (from_last_keys(p)) return tiles_before(mask, key_tile, query_tile);
    return key_tile - mask.first_key(query_tile * config::block_m) / config::block_n;
}

// The tiles of Q that pass, for additions in that order.
struct TilesInOrder : PassingTiles {
    int tiles;  // of all heads

    __device__ TilesInOrder(int first_row, int end_row, int first_head_, int heads_)
        : PassingTiles(first_row, end_row, first_head_, heads_), tiles(PassingTiles::count()) {
        if (heads == 1) number = first;
    }

    __device__ int count() const { return tiles; }

    __device__ void advance() {
        if (heads == 1)
            ++number;
        else
            PassingTiles::advance();
    }
};
using RowTiles = std::conditional_t<config::deterministic, TilesInOrder, PassingTiles>;
