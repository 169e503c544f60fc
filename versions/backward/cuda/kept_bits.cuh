// Which weights of a warp's step are kept, a bit for each of a lane's scores: one register for P and for dP.
#pragma once
#include "softmax/dropout.cuh"
#include "warpgroup_tiles.cuh"

struct KeptBits {
    uint32_t bits;  // bit 8 i + 2 step + n is of score n of block[step][0][i] of an operand

    __device__ bool has(int step, int i, int n) const { return bits >> (8 * i + 2 * step + n) & 1; }

    // Of 16 keys and the 64 rows of a step.
    __device__ void draw(const Dropout<true> &dropping, int first_row, int first_key) {
        constexpr uint32_t top = 0x80808080;
        const int swapped = first_key / 16 % 2;  // the words of a pair
        bits = 0;
#pragma unroll
        for (int step = 0; step < step_rows / 16; step += 2) {
            const auto pairs = dropping.draw<true, 16>(first_key, 0, first_row + step * 16);
#pragma unroll
            for (int square = 0; square < 2; ++square) {
                const uint32_t first = (pairs.words[square][0] & top) >> (1 - swapped);
                const uint32_t second = (pairs.words[square][1] & top) >> swapped;
                bits |= (first | second) >> (6 - 2 * (step + square));
            }
        }
    }

    // P^T, in which what is dropped is zero.
    __device__ ScoresOperand of(const ScoresOperand &p) const {
        ScoresOperand kept;
#pragma unroll
        for (int step = 0; step < step_rows / 16; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t mask = spread_signs(bits << (7 - 2 * step), bits << (6 - 2 * step), 0xcc88 + 0x1111 * i);
                kept.block[step][0][i] = p.block[step][0][i] & mask;
            }
        return kept;
    }

    // The same of dP^T.
    __device__ void drop(Scores &dp) const {
#pragma unroll
        for (int step = 0; step < step_rows / 16; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    float &gradient = dp.block[0][step * 2 + i / 2][i % 2 * 2 + n];
                    gradient = has(step, i, n) ? gradient : 0.0f;
                }
    }
};
