// Additions to dQ in one order, that of the launch of the CTAs of a head. So each waits for CTAs that were launched before
// it, which end whatever comes behind them.
#pragma once
#include "backward_params.cuh"
#include "ptx/memory_order.cuh"

// The tile of keys of this CTA, where CTAs begin with the last keys of a head.
__device__ inline int tile_from_the_end() { return gridDim.x - 1 - blockIdx.x; }

// How many tiles of keys are then added before this one to a tile of Q: those behind it that its last row sees.
template <class Mask>
__device__ inline int tiles_before(const Mask &mask, int key_tile, int query_tile) {
    const int last_row = query_tile * config::block_m + config::block_m - 1;
    return (mask.end_key(last_row) - 1) / config::block_n - key_tile;
}

// Waits until so many tiles have been added.
__device__ inline void wait_until_added(const unsigned *added, int tiles) {
    while (load_acquire(added) != tiles) {}
}

// Waits until any has been added.
__device__ inline void wait_for_first(const unsigned *added) {
    while (load_acquire(added) == 0) {}
}
