// Registers -> shared memory -> global memory, the second step by TMA: each warp has its rows stored, and goes on.
#pragma once
#include "ptx/sm90.cuh"
#include "tile/fragment.cuh"
#include "tile/reader.cuh"

// Starts storing a warp's 16 rows of O, whose place in shared memory is free: rows from `first_row` on of a tile, and from
// `row` on of the head. O goes there by stmatrix, 16 x 16 at a time; `place` has the lane's address. The map has boxes of
// 16 rows.
template <class Tile, class T, int head_dim>
__device__ inline void start_store(T *tile, int first_row, const HoistedReader<Tile, T> &place,
                                   const Accumulator<16, head_dim> &o, const TensorMapBytes &map, int row, int head,
                                   int batch) {
    const auto rounded = round_to_operand<T>(o);  // blocks as ldmatrix has them
#pragma unroll
    for (int step = 0; step < head_dim / 16; ++step) stmatrix_x4(place.address(0, step * 16), rounded.block[step][0]);
    fence_proxy_async();  // TMA sees what each lane wrote
    __syncwarp();
    if (lane_index() == 0) {
#pragma unroll
        for (int panel = 0; panel < Tile::panels; ++panel)
            tma_store(map, tile + Tile::step(first_row, panel * 64), panel * 64, row, head, batch);
        tma_store_commit();
    }
    __syncwarp();
}

// The same, with the address worked out now.
template <class Tile, class T, int head_dim>
__device__ inline void start_store(T *tile, int first_row, const Accumulator<16, head_dim> &o, const TensorMapBytes &map,
                                   int row, int head, int batch) {
    HoistedReader<Tile, T> place;
    place.start(tile, first_row);
    start_store<Tile>(tile, first_row, place, o, map, row, head, batch);
}

// All stores of this warp have read their shared memory. No branch: a lane that has started none does not wait.
__device__ inline void wait_for_stores() {
    tma_store_wait_read();
    __syncwarp();
}
