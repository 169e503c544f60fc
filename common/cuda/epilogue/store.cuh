// Registers -> shared memory -> global memory.
#pragma once
#include "tile/fragment.cuh"

// Writes a warp's accumulator, rounded to T, to rows first_row.. of a tile in shared memory.
template <class Tile, class T, int rows, int cols>
__device__ inline void store_to_shared(T *shared, int first_row, const Accumulator<rows, cols> &c) {
#pragma unroll
    for (int m = 0; m < rows / 16; ++m)
#pragma unroll
        for (int n = 0; n < cols / 8; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = first_row + m * 16 + h * 8 + accumulator_row();
                store_shared_4(shared_address(shared + Tile::offset(row, n * 8 + accumulator_col())),
                               pack<T>(c.block[m][n][2 * h], c.block[m][n][2 * h + 1]));
            }
}

// The same, with the swizzle worked out once. It depends on the column's position among 64 alone: eight blocks of 8.
template <class Tile, class T, int rows, int cols>
__device__ inline void store_to_shared_hoisted(T *shared, int first_row, const Accumulator<rows, cols> &c) {
    uint32_t base[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
        base[i] = shared_address(shared + first_row * Tile::row_pitch +
                                 Tile::offset(accumulator_row(), i * 8 + accumulator_col()));
#pragma unroll
    for (int m = 0; m < rows / 16; ++m)
#pragma unroll
        for (int n = 0; n < cols / 8; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                store_shared_4(base[n % 8] + Tile::step(m * 16 + h * 8, n / 8 * 64) * sizeof(T),
                               pack<T>(c.block[m][n][2 * h], c.block[m][n][2 * h + 1]));
}

// How 16 bytes go to global memory: as usual, or without taking a place in L1, as nobody on this SM reads them again.
struct StoreDefault {
    __device__ static void store(void *global, uint4 value) { store_global_16(global, value); }
};
struct StoreNoAllocate {
    __device__ static void store(void *global, uint4 value) { store_global_16_no_allocate(global, value); }
};

// Copies a warp's rows of a tile from shared to global memory, 16 bytes a lane.
template <class Tile, int rows, class Store = StoreDefault, class T>
__device__ inline void store_rows(T *global, long long row_stride, const T *shared, int first_row) {
    constexpr int chunk = 16 / sizeof(T);
    constexpr int lanes_per_row = Tile::cols / chunk;
    const int col = lane_index() % lanes_per_row * chunk;
#pragma unroll
    for (int step = 0; step < rows; step += 32 / lanes_per_row) {
        const int row = first_row + step + lane_index() / lanes_per_row;
        Store::store(global + row * row_stride + col, load_shared_16(shared_address(shared + Tile::offset(row, col))));
    }
}
