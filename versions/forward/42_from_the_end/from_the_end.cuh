// Tiles counted from a head's last rows, so that the one which is not full has the first rows.
#pragma once
#include "34_any_attention/tile_queue.cuh"
#include "tile/warpgroup_gemm.cuh"

// How far above row 0 the first of so many tiles begins: the last one ends with the last row's warpgroup.
template <int block_m>
__device__ inline int rows_above(int blocks, int seqlen_q) {
    return blocks * block_m - (seqlen_q + warpgroup_rows - 1) / warpgroup_rows * warpgroup_rows;
}

// Under a causal mask the first rows see the fewest keys. The first tile then begins `above` rows before row 0. These are
// whole warpgroups, which have nothing to do. Without a mask all tiles cost the same, and they are counted from row 0.
template <int block_m, int head_dim, bool causal>
struct OrderFromEnd : TileOrder<block_m, head_dim, causal> {
    using Order = TileOrder<block_m, head_dim, causal>;
    const int above;

    __device__ explicit OrderFromEnd(const AttentionParams &params)
        : Order(params), above(causal ? rows_above<block_m>(this->blocks, params.seqlen_q) : 0) {}

    __device__ typename Order::Tile tile(int number) const {
        auto tile = Order::tile(number);
        tile.first_row -= above;
        return tile;
    }
};
