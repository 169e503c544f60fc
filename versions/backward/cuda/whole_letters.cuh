// What a value warp tells the key warp of its pair in fp32, so that dS is made of weights that were not rounded. A pair's slot
// is as large as its dS of a tile, so it takes half of a tile's rows at most: a letter waits until the one before is read.
//
// Both warps hold a tile in the same order, so that a lane has 16 bytes for the lane of the same number for each block of 16 x 8.
#pragma once
#include "config.cuh"
#include "ptx/named_barrier.cuh"
#include "softmax/dropout.cuh"
#include "tile/fragment.cuh"

template <int keys, int rows>
struct WholeLetters {
    static constexpr int letter_rows = rows < config::block_m / 2 ? rows : config::block_m / 2;
    static constexpr int num_blocks = letter_rows / 8;  // of a letter, each of 8 rows
    static constexpr int num_letters = rows / letter_rows;
    static constexpr int num_pairs = config::block_n / config::warp_keys;

    float4 *slot;
    int posted, read;  // barriers of the two warps

    template <class T>
    __device__ WholeLetters(T *slots, int pair)
        : slot(reinterpret_cast<float4 *>(slots + pair * config::block_m * config::warp_keys) + lane_index()),
          posted(1 + pair), read(1 + num_pairs + pair) {}

    // The value warp's: what dP is to be multiplied by, of the rows from `row` of the tile on.
    __device__ void post(const Accumulator<keys, rows> &weights, int row) const {
#pragma unroll
        for (int letter = 0; letter < num_letters; ++letter) {
            if (letter > 0 || row > 0) named_barrier_sync(read, 64);
#pragma unroll
            for (int n = 0; n < num_blocks; ++n)
#pragma unroll
                for (int m = 0; m < keys / 16; ++m) {
                    const float (&of)[4] = weights.block[m][letter * num_blocks + n];
                    slot[(n * (keys / 16) + m) * 32] = {of[0], of[1], of[2], of[3]};
                }
            named_barrier_arrive(posted, 64);
        }
    }

    // The key warp's: visit(m, n, weights) for each block of the rows from `row` of the tile on, with its four weights.
    template <class Visit>
    __device__ void read_all(int row, Visit visit) const {
#pragma unroll
        for (int letter = 0; letter < num_letters; ++letter) {
            named_barrier_sync(posted, 64);
#pragma unroll
            for (int n = 0; n < num_blocks; ++n)
#pragma unroll
                for (int m = 0; m < keys / 16; ++m) visit(m, letter * num_blocks + n, slot[(n * (keys / 16) + m) * 32]);
            if (row + (letter + 1) * letter_rows < config::block_m) named_barrier_arrive(read, 64);
        }
    }

    // C *= weights, element by element
    __device__ void multiply(Accumulator<keys, rows> &c, int row) const {
        read_all(row, [&](int m, int n, float4 weights) {
            float (&of)[4] = c.block[m][n];
            of[0] *= weights.x, of[1] *= weights.y, of[2] *= weights.z, of[3] *= weights.w;
        });
    }

    // C = |weight| * (dropped ? -delta : rescale * C - delta), where the sign tells what is dropped. `delta` is that of the
    // first row of Q, which is a column here.
    __device__ void multiply_signed(Accumulator<keys, rows> &c, int row, const float *delta, float rescale) const {
        read_all(row, [&](int m, int n, float4 letter) {
            const float weights[4] = {letter.x, letter.y, letter.z, letter.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float &x = c.block[m][n][i];
                const float kept = __float_as_uint(weights[i]) >> 31 ? 0.0f : rescale * x;
                x = fabsf(weights[i]) * (kept - delta[n * 8 + accumulator_col() + i % 2]);
            }
        });
    }
};

// Puts a sign into each weight that is dropped, and a zero into P as an operand.
template <bool dropout, int keys, int rows>
__device__ inline void sign_and_drop(const Dropout<dropout> &dropping, Accumulator<keys, rows> &signs, HeldA<keys, rows> &kept,
                                     int first_row, int first_key) {
    dropping.template each_pair<true, keys, rows>(first_row, first_key, [&](int step, int m, int i, uint32_t mask) {
        float (&of)[4] = signs.block[m][step * 2 + i / 2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            float &x = of[i % 2 * 2 + n];
            x = __uint_as_float(__float_as_uint(x) | (~mask << (n ? 0 : 16) & 0x80000000));
        }
        kept.block[step][m][i] &= mask;
    });
}
