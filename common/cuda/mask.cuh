// Which keys a row of Q sees: all of them, or with a causal mask none after its own position. The mask is aligned to
// the bottom right, so that the last row sees all keys.
#pragma once
#include "gemm.cuh"
#include "params.cuh"

// Row i of Q sees the first `keys(i)` keys. These are all seqlen_k of them; with a causal mask they are
// i + 1 + seqlen_k - seqlen_q.
template <bool causal>
struct Mask {
    int seqlen_k;
    int shift;

    __device__ explicit Mask(const AttentionParams &params)
        : seqlen_k(params.seqlen_k), shift(params.seqlen_k - params.seqlen_q + 1) {}

    // 0 or less means that the row sees no key.
    __device__ int keys(int row) const { return causal ? min(row + shift, seqlen_k) : seqlen_k; }

    // How many blocks of block_n keys have a key that some row before `end_row` sees.
    template <int block_n>
    __device__ int blocks(int end_row) const {
        return (max(keys(end_row - 1), 0) + block_n - 1) / block_n;
    }

    // How many of these blocks, from key 0 on, are plain. Every row from `first_row` on sees a plain block whole, and
    // also sees a key of a later block.
    template <int block_n>
    __device__ int plain_blocks(int first_row) const {
        return max(keys(first_row) - 1, 0) / block_n;
    }

    // S holds the scores of the rows from `first_row` on and the keys from `first_key` on. Sets to minus infinity those
    // of keys that a row does not see.
    template <int rows, int cols>
    __device__ void hide(Accumulator<rows, cols> &s, int first_row, int first_key) const {
        if (first_key + cols <= keys(first_row)) return;
#pragma unroll
        for (int b = 0; b < rows / 16; ++b)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = first_row + b * 16 + h * 8 + accumulator_row();
                const int end = keys(row) - first_key - accumulator_col();
#pragma unroll
                for (int n = 0; n < cols / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (n * 8 + i >= end) s.block[b][n][2 * h + i] = -INFINITY;
            }
    }
};
