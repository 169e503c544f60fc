// Tiles counted from a head's last rows, so that the one which is not full has the first rows.
#pragma once
#include "tile_queue.cuh"
#include "wgmma.cuh"

// Under a causal mask the first rows see the fewest keys. The first tile then begins `above` rows before row 0. These are
// whole warpgroups, which have nothing to do. Without a mask all tiles cost the same, and they are counted from row 0.
template <int block_m, int head_dim, bool causal>
struct OrderFromEnd : TileOrder<block_m, head_dim, causal> {
    using Order = TileOrder<block_m, head_dim, causal>;
    const int above;

    __device__ explicit OrderFromEnd(const AttentionParams &params)
        : Order(params), above(causal ? this->blocks * block_m - to_warpgroups(params.seqlen_q) : 0) {}

    __device__ typename Order::Tile tile(int number) const {
        auto tile = Order::tile(number);
        tile.first_row -= above;
        return tile;
    }

  private:
    // Rows, and those that the last warpgroup lacks.
    __device__ static int to_warpgroups(int rows) { return (rows + warpgroup_rows - 1) / warpgroup_rows * warpgroup_rows; }
};
