// fp32 sums of a tile in the order in which warps hold them, in global memory: element by element of the accumulators of
// all warps of a CTA, 32 lanes in a row.
#pragma once
#include "tile/fragment.cuh"

// Visits the elements of a warp's accumulator with their places.
template <int rows, int cols, class Visit>
__device__ inline void each_fragment(Accumulator<rows, cols> &c, float *tile, Visit visit) {
    float *place = tile + warp_index() * rows * cols + lane_index();
#pragma unroll
    for (int m = 0; m < rows / 16; ++m)
#pragma unroll
        for (int n = 0; n < cols / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) visit(place + ((m * (cols / 8) + n) * 4 + i) * 32, c.block[m][n][i]);
}

template <int rows, int cols>
__device__ inline void add_fragments(float *tile, Accumulator<rows, cols> &c) {
    each_fragment(c, tile, [](float *place, float x) { atomicAdd(place, x); });
}

template <int rows, int cols>
__device__ inline Accumulator<rows, cols> load_fragments(float *tile) {
    Accumulator<rows, cols> c;
    each_fragment(c, tile, [](float *place, float &x) { x = *place; });
    return c;
}

// Writes a warp's accumulator, rounded to T, to its rows and columns of a tile in shared memory.
template <class Tile, class T, int rows, int cols>
__device__ inline void store_block_to_shared(T *shared, int first_row, int first_col, const Accumulator<rows, cols> &c) {
#pragma unroll
    for (int m = 0; m < rows / 16; ++m)
#pragma unroll
        for (int n = 0; n < cols / 8; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = first_row + m * 16 + h * 8 + accumulator_row(), col = first_col + n * 8 + accumulator_col();
                store_shared_4(shared_address(shared + Tile::offset(row, col)),
                               pack<T>(c.block[m][n][2 * h], c.block[m][n][2 * h + 1]));
            }
}
