// dQ = dS K: the one product whose result the CTA does not keep, and whose operand dS comes from all of its warps.
#pragma once
#include "tile/gemm.cuh"

// dS as the A operand. Shared memory has dS^T: a row of the tile is a key, so blocks are transposed on their way.
template <int rows, int k, class Reader>
struct DSOperand {
    Reader reader;
    Stream<rows / 16, k, 2, 1> stream;

    __device__ void fetch(int step) {
        stream.fetch(step, [&](uint32_t (&block)[4], int m, int k_) { ldmatrix_x4_trans(block, reader.address(k_, m)); });
    }
    __device__ const uint32_t (&at(int step, int m) const)[4] { return stream.block[step % stream.slots][m]; }
};

// Reads the columns of a tile from `first_col` on.
template <class Tile, class T, class Lanes_ = ByColumn>
struct ColumnReader {
    using Lanes = Lanes_;
    const T *shared;
    int first_col;

    __device__ void start(const T *tile, int first_col_) { shared = tile, first_col = first_col_; }
    __device__ uint32_t address(int row, int col) const {
        return shared_address(shared + Tile::offset(row + Lanes::row(), first_col + col + Lanes::col()));
    }
};

// The same, with one address worked out for the whole tile: `first_col` is a multiple of the columns that are read, and
// these divide 64 or are divided by it, so that the exclusive or of a column does not meet that of `first_col`.
template <class Tile, class T, class Lanes = ByColumn>
struct HoistedColumns : HoistedReader<Tile, T, Lanes> {
    __device__ void start(const T *tile, int first_col) {
        this->base = shared_address(tile + Tile::offset(Lanes::row(), first_col + Lanes::col()));
    }
};

// Adds a warp's accumulator to fp32 rows in global memory, which other CTAs add to.
template <int rows, int cols>
__device__ inline void add_rows(float *sum, int row_stride, const Accumulator<rows, cols> &c) {
#pragma unroll
    for (int m = 0; m < rows / 16; ++m)
#pragma unroll
        for (int n = 0; n < cols / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                atomicAdd(sum + (m * 16 + i / 2 * 8 + accumulator_row()) * row_stride + n * 8 + accumulator_col() + i % 2,
                          c.block[m][n][i]);
}
