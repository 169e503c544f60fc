// What two warps of a pair tell each other. Both hold a tile in the same order, so that a lane has a letter for the lane of
// the same number: 16 bytes for each block of 16 x 16.
#pragma once
#include "config.cuh"
#include "ptx/named_barrier.cuh"
#include "tile/fragment.cuh"

// Of a pair's letters about the rows of Q from `row` on, the first one of the lane.
template <class T>
__device__ inline uint4 *mailbox(T *letters, int pair, int row) {
    return reinterpret_cast<uint4 *>(letters + (pair * config::block_m + row) * config::warp_keys) + lane_index();
}

template <int rows, int k>
__device__ inline void post(uint4 *mailbox, const HeldA<rows, k> &p) {
#pragma unroll
    for (int step = 0; step < k / 16; ++step)
#pragma unroll
        for (int m = 0; m < rows / 16; ++m) {
            const uint32_t (&block)[4] = p.block[step][m];
            mailbox[(step * (rows / 16) + m) * 32] = {block[0], block[1], block[2], block[3]};
        }
}

// C *= P, element by element.
template <class T, int rows, int k>
__device__ inline void multiply(Accumulator<rows, k> &c, const uint4 *mailbox) {
#pragma unroll
    for (int step = 0; step < k / 16; ++step)
#pragma unroll
        for (int m = 0; m < rows / 16; ++m) {
            const uint4 letter = mailbox[(step * (rows / 16) + m) * 32];
            const uint32_t block[4] = {letter.x, letter.y, letter.z, letter.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const T *p = reinterpret_cast<const T *>(&block[i]);
                float (&of)[4] = c.block[m][step * 2 + i / 2];
                of[i % 2 * 2] *= static_cast<float>(p[0]);
                of[i % 2 * 2 + 1] *= static_cast<float>(p[1]);
            }
        }
}

// Writes an operand to rows first_row.. and columns first_col.. of a tile in shared memory.
template <class Tile, class T, int rows, int k>
__device__ inline void store_operand(T *shared, int first_row, int first_col, const HeldA<rows, k> &a) {
#pragma unroll
    for (int step = 0; step < k / 16; ++step)
#pragma unroll
        for (int m = 0; m < rows / 16; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = first_row + m * 16 + i % 2 * 8 + accumulator_row();
                const int col = first_col + step * 16 + i / 2 * 8 + accumulator_col();
                store_shared_4(shared_address(shared + Tile::offset(row, col)), a.block[step][m][i]);
            }
}
