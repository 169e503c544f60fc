// What a pair of warps tell each other where weights are dropped: P, none of which is negative, with the sign of a
// negative number where it is dropped. So the mask is worked out once for the two of them.
#pragma once
#include "pair.cuh"
#include "softmax/dropout.cuh"

// `signs` and `kept` are P^T of a warp, whose scores begin at a row of Q and a key. Puts the signs into the one, and zeros
// into the other.
template <bool dropout, int keys, int rows>
__device__ inline void sign_and_drop(const Dropout<dropout> &dropping, HeldA<keys, rows> &signs,
                                     HeldA<keys, rows> &kept, int first_row, int first_key) {
    dropping.template each_pair<true, keys, rows>(first_row, first_key, [&](int step, int m, int i, uint32_t mask) {
        signs.block[step][m][i] |= ~mask & 0x80008000;
        kept.block[step][m][i] &= mask;
    });
}

// C = |P| * (dropped ? -delta : rescale * C - delta), element by element. `delta` is that of the first row of Q, which is
// a column here.
template <class T, int keys, int rows>
__device__ inline void multiply_signed(Accumulator<keys, rows> &c, const uint4 *mailbox, const float *delta,
                                       float rescale) {
#pragma unroll
    for (int step = 0; step < rows / 16; ++step)
#pragma unroll
        for (int m = 0; m < keys / 16; ++m) {
            const uint4 letter = mailbox[(step * (keys / 16) + m) * 32];
            const uint32_t block[4] = {letter.x, letter.y, letter.z, letter.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int col = step * 16 + i / 2 * 8 + accumulator_col();
                const T *p = reinterpret_cast<const T *>(&block[i]);
                float (&of)[4] = c.block[m][step * 2 + i / 2];
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const bool is_dropped = block[i] >> (16 * n + 15) & 1;
                    float &x = of[i % 2 * 2 + n];
                    x = fabsf(static_cast<float>(p[n])) * ((is_dropped ? 0.0f : rescale * x) - delta[col + n]);
                }
            }
        }
}
