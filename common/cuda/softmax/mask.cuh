// Which keys a row of Q sees: all of them, or with a causal mask none after its own position, or with a window none that
// is too far from there. Masks are aligned to the bottom right, so that the last row's own key is the last one.
#pragma once
#include "params.cuh"
#include "tile/fragment.cuh"

// Row i of Q sees the first `keys(i)` keys. These are all seqlen_k of them; with a causal mask they are
// i + 1 + seqlen_k - seqlen_q, and with a window `right` more. Of these it sees none before `first(i)`.
template <bool causal, bool window = false>
struct Mask {
    int seqlen_k;
    int shift;
    int left, right;  // of a window

    template <class Params>
    __device__ explicit Mask(const Params &params) {
        take(params.seqlen_q, params.seqlen_k);
        if constexpr (window) left = params.window_left, right = causal ? 0 : params.window_right;
    }
    // Of a sequence that is not as long as those of the parameters.
    __device__ void take(int seqlen_q, int seqlen_k_) {
        seqlen_k = seqlen_k_;
        shift = seqlen_k - seqlen_q + 1;
    }

    // 0 or less means that the row sees no key.
    __device__ int keys(int row) const {
        if (window) return min(row + shift + right, seqlen_k);
        return causal ? min(row + shift, seqlen_k) : seqlen_k;
    }
    // Rows behind the last one see as much as that.
    __device__ int first(int row) const { return window ? max(min(row + shift, seqlen_k) - 1 - left, 0) : 0; }

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

    // The first block that has a key which some row from `first_row` on sees.
    template <int block_n>
    __device__ auto first_block(int first_row) const {
        if constexpr (window)
            return first(first_row) / block_n;
        else
            return Zero{};
    }

    // The first block from which on all rows up to `last_row` see all keys, as far as a window's left end is concerned.
    template <int block_n>
    __device__ auto first_plain_block(int last_row) const {
        if constexpr (window)
            return (first(last_row) + block_n - 1) / block_n;
        else
            return Zero{};
    }

    // S holds the scores of the rows from `first_row` on and the keys from `first_key` on. Sets to minus infinity those
    // of keys that a row does not see.
    template <int rows, int cols>
    __device__ void hide(Accumulator<rows, cols> &s, int first_row, int first_key) const {
        if (first_key + cols <= keys(first_row) && (!window || first_key >= first(first_row + rows - 1))) return;
#pragma unroll
        for (int b = 0; b < rows / 16; ++b)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = first_row + b * 16 + h * 8 + accumulator_row();
                const int end = keys(row) - first_key - accumulator_col();
                const int begin = first(row) - first_key - accumulator_col();
#pragma unroll
                for (int n = 0; n < cols / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (n * 8 + i >= end || (window && n * 8 + i < begin)) s.block[b][n][2 * h + i] = -INFINITY;
            }
    }
};
