// Which rows of Q see a key: all, or with a causal mask those from its own position on, or with a window those that are not
// too far from there. Masks are aligned to the bottom right, so that the last row sees the last key.
#pragma once
#include "tile/fragment.cuh"

template <bool causal, bool window = false>
struct BoundedKeyMask {
    int seqlen_k, shift, nobody;
    int left, right;  // of a window

    template <class Params>
    __device__ explicit BoundedKeyMask(const Params &p) {
        take(p.seqlen_q, p.seqlen_k);
        if constexpr (window) left = p.window_left, right = causal ? 0 : p.window_right;
    }
    // Of a sequence that is not as long as those of the parameters.
    __device__ void take(int seqlen_q, int seqlen_k_) {
        seqlen_k = seqlen_k_;
        shift = seqlen_k - seqlen_q;
        nobody = seqlen_q;
    }

    // The first row that sees a key. Of a key behind the last one there is none.
    __device__ int first_row(int key) const {
        if (key >= seqlen_k) return nobody;
        if (window) return max(key - shift - right, 0);
        return causal ? max(key - shift, 0) : 0;
    }
    // The first key that a row sees, and the key behind the last one.
    __device__ int first_key(int row) const { return window ? max(row + shift - left, 0) : 0; }
    __device__ int end_key(int row) const {
        return window || causal ? min(row + shift + (window ? right : 0) + 1, seqlen_k) : seqlen_k;
    }
    // The row behind the last one that sees it, or would if there were as many.
    __device__ int end_row(int key) const { return window ? key - shift + left + 1 : nobody; }

    __device__ bool shows(int key, int row) const {
        return row >= first_row(key) && row < (window ? min(end_row(key), nobody) : nobody);
    }
    // So many keys and rows from the first ones on.
    __device__ bool shows_all(int first_key, int keys, int first_row_, int rows) const {
        return first_row(first_key + keys - 1) <= first_row_ &&
               first_row_ + rows <= (window ? min(end_row(first_key), nobody) : nobody);
    }

    // S^T holds the scores of the keys from `first_key` on and the rows from `first_row_` on. Sets to `hidden` those of rows that
    // do not see a key.
    template <int keys, int rows>
    __device__ void hide(Accumulator<keys, rows> &s, int first_key, int first_row_, float hidden = -INFINITY) const {
        if (first_row(first_key + keys - 1) <= first_row_ && (!window || first_row_ + rows <= end_row(first_key))) return;
#pragma unroll
        for (int m = 0; m < keys / 16; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int key = first_key + m * 16 + h * 8 + accumulator_row(), at = first_row_ + accumulator_col();
                const int first = first_row(key) - at, end = end_row(key) - at;
#pragma unroll
                for (int n = 0; n < rows / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (n * 8 + i < first || (window && n * 8 + i >= end)) s.block[m][n][2 * h + i] = hidden;
            }
    }
};
