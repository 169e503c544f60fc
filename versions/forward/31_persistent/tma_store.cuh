// Registers -> shared memory -> global memory, the second step by TMA: each warp has its rows stored, and goes on.
#pragma once
#include "epilogue/store.cuh"
#include "ptx/sm90.cuh"

// Before shared memory is written again: all stores of this warp have read theirs.
__device__ inline void wait_for_stores() {
    if (lane_index() == 0) tma_store_wait_read();
    __syncwarp();
}

// Starts storing 16 rows that this warp has written, which lie from `first_row` on in the tile and from `row` on in the
// head. The map has boxes of 16 rows.
template <class Tile, class T>
__device__ inline void start_storing(const T *tile, int first_row, const TensorMapBytes &map, int row, int head, int batch) {
    fence_proxy_async();  // TMA sees what each lane wrote
    __syncwarp();
    if (lane_index() != 0) return;
#pragma unroll
    for (int panel = 0; panel < Tile::panels; ++panel)
        tma_store(map, tile + Tile::step(first_row, panel * 64), panel * 64, row, head, batch);
    tma_store_commit();
}

// Writes a warp's rows of O, and starts storing them.
template <class Tile, class T, int head_dim>
__device__ inline void start_store(T *tile, int first_row, const Accumulator<16, head_dim> &o, const TensorMapBytes &map,
                                   int row, int head, int batch) {
    wait_for_stores();
    store_to_shared_hoisted<Tile>(tile, first_row, o);
    start_storing<Tile>(tile, first_row, map, row, head, batch);
}
