// Global memory -> shared memory -> registers.
#pragma once
#include "layout.cuh"
#include "ptx.cuh"

// Starts copying a tile from global to shared memory, 16 bytes a lane. Each warp takes a band of consecutive rows.
template <class Tile, int num_warps, class T>
__device__ inline void copy_tile_by_warps(T *shared, const T *global, long long row_stride) {
    constexpr int chunk = 16 / sizeof(T);
    constexpr int lanes_per_row = Tile::cols / chunk;
    constexpr int rows_per_step = 32 / lanes_per_row;
    constexpr int rows_per_warp = Tile::rows / num_warps;
    static_assert(rows_per_warp % rows_per_step == 0, "a warp copies whole steps");

    const int col = lane_index() % lanes_per_row * chunk;
    const int first_row = warp_index() * rows_per_warp + lane_index() / lanes_per_row;
#pragma unroll
    for (int step = 0; step < rows_per_warp; step += rows_per_step) {
        const int row = first_row + step;
        cp_async_16(shared_address(shared + Tile::offset(row, col)), global + row * row_stride + col);
    }
}

// Reads 16 x 16 blocks of a tile in shared memory, as four 8 x 8 blocks in the order
//     0 2      which is an A operand as mma wants it, and, transposed, two B operands:
//     1 3      (0, 1) and (2, 3). Not transposed, the two B operands are (0, 2) and (1, 3).
template <class Tile, class T>
struct BlockReader {
    const T *shared;

    __device__ void load(uint32_t (&block)[4], int row, int col) const { ldmatrix_x4(block, address(row, col)); }

    __device__ void load_trans(uint32_t (&block)[4], int row, int col) const {
        ldmatrix_x4_trans(block, address(row, col));
    }

    __device__ uint32_t address(int row, int col) const {
        return shared_address(shared + Tile::offset(row + lane_index() % 16, col + lane_index() / 16 * 8));
    }
};
