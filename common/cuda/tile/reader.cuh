// Shared memory -> registers, by ldmatrix.
#pragma once
#include "ptx/sm80.cuh"
#include "tile/layout.cuh"

// One ldmatrix.x4 reads 16 x 16 elements, as four 8 x 8 blocks. These types say which lane points at which row, and so
// in which order the blocks arrive. An mma takes its B operand from two neighbouring registers.
//
//     ByColumn:  0 2    An A operand, as mma wants it. Transposed: two B operands, (0, 1) and (2, 3).
//                1 3    Not transposed, the B operands are (0, 2) and (1, 3), which needs moves.
//
//     ByRow:     0 1    Not transposed: two B operands, (0, 1) and (2, 3), without moves.
//                2 3
struct ByColumn {
    __device__ static int row() { return lane_index() % 16; }
    __device__ static int col() { return lane_index() / 16 * 8; }
    __device__ static constexpr int block(int row_half, int col_half) { return row_half + 2 * col_half; }
};
struct ByRow {
    __device__ static int row() { return lane_index() % 8 + lane_index() / 16 * 8; }
    __device__ static int col() { return lane_index() & 8; }
    __device__ static constexpr int block(int row_half, int col_half) { return 2 * row_half + col_half; }
};

// Reads 16 x 16 blocks of a tile in shared memory. Every address is worked out where it is used.
template <class Tile, class T, class Lanes_ = ByColumn>
struct BlockReader {
    using Lanes = Lanes_;
    const T *shared;

    __device__ void start(const T *tile, int first_row = 0) { shared = tile + first_row * Tile::row_pitch; }
    __device__ uint32_t address(int row, int col) const {
        return shared_address(shared + Tile::offset(row + Lanes::row(), col + Lanes::col()));
    }
};

// The same, with one address worked out for the whole tile. The swizzle is an exclusive or. So a column that is a
// multiple of 16 further on is reached by one more exclusive or, with the column's position among 64. The compiler
// keeps these four addresses for all rows. From there, rows and panels of 64 columns are constants.
template <class Tile, class T, class Lanes_ = ByColumn>
struct HoistedReader {
    using Lanes = Lanes_;
    uint32_t base;

    __device__ void start(const T *tile, int first_row = 0) {
        base = shared_address(tile + first_row * Tile::row_pitch + Tile::offset(Lanes::row(), Lanes::col()));
    }
    __device__ uint32_t address(int row, int col) const {
        return (base ^ col % 64 * static_cast<int>(sizeof(T))) + Tile::step(row, col / 64 * 64) * sizeof(T);
    }
};
