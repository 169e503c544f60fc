// Global memory -> shared memory, each warp for itself.
#pragma once
#include "ptx/sm80.cuh"
#include "tile/layout.cuh"

// Starts copying a tile of keys by the warp that will read it, 16 bytes a lane. `row` says where a row begins. Zeros take
// the place of rows from `rows` on: P is 0 there, and 0 * V must be 0.
template <class Tile, class T, class Row>
__device__ inline void copy_rows_by_warp(T *shared, int rows, Row row) {
    const int col = lane_index() % 8 * 8;
#pragma unroll
    for (int first = 0; first < Tile::rows; first += 4) {
        const int r = first + lane_index() / 8;
        const T *from = row(r);
#pragma unroll
        for (int panel = 0; panel < Tile::cols; panel += 64)
            if (Tile::cols % 64 == 0 || panel + col < Tile::cols)
                cp_async_16_or_zeros(shared_address(shared + Tile::offset(r, panel + col)), from + panel + col, r < rows);
    }
}
