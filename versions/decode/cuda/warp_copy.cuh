// Global memory -> shared memory, each warp for itself.
#pragma once
#include "ptx/sm80.cuh"
#include "tile/layout.cuh"

// Starts copying `count` rows of a tile, from row `at` on, 16 bytes a lane. `row(r)` says where row at + r begins. Zeros
// take the place of columns that it has not, has(r, col): P is 0 there, and 0 * V must be 0.
template <class Tile, int count, class T, class Row, class Has>
__device__ inline void copy_part_by_warp(T *shared, int at, Row row, Has has) {
    const int col = lane_index() % 8 * 8;
#pragma unroll
    for (int first = 0; first < count; first += 4) {
        const int r = first + lane_index() / 8;
        const T *from = row(r);
#pragma unroll
        for (int panel = 0; panel < Tile::cols; panel += 64)
            if (Tile::cols % 64 == 0 || panel + col < Tile::cols)
                cp_async_16_or_zeros(shared_address(shared + Tile::offset(at + r, panel + col)), from + panel + col,
                                     has(r, panel + col));
    }
}

// Copies a tile of keys, by the warp that will read it, of which rows from `rows` on are not there.
template <class Tile, class T, class Row>
__device__ inline void copy_rows_by_warp(T *shared, int rows, Row row) {
    copy_part_by_warp<Tile, Tile::rows>(shared, 0, row, [&](int r, int) { return r < rows; });
}
