// An online softmax for rows of which some scores, or all, are hidden.
#pragma once
#include <float.h>

#include "lazy_softmax.cuh"

// Anchored, as AnchoredSoftmax, once `update` has shown a row a score that is not hidden. Until then m is the lowest
// finite number, for which hidden scores, -inf, are exponentials of 0, and which the first other score raises. A row
// that sees no key ends with O = 0 and a log-sum-exp of -inf.
template <class T, int rows>
struct MaskedSoftmax : AnchoredSoftmax<T, rows> {
    __device__ void clear() {
        this->each_row([&](int b, int h) {
            this->m[b][h] = -FLT_MAX;
            this->l[b][h] = 0.0f;
        });
    }

    // O /= l, with one reciprocal a row.
    template <int head_dim>
    __device__ void finish(Accumulator<rows, head_dim> &o) {
        this->each_row([&](int b, int h) {
            this->l[b][h] = quad_sum(this->l[b][h]);
            this->scale_row(o, b, h, this->l[b][h] > 0.0f ? 1.0f / this->l[b][h] : 0.0f);
        });
    }

    // Writes the log-sum-exp of the warp's rows before row `end`, in natural logarithms.
    __device__ void store_lse(float *lse, int end) const {
        if (lane_index() % 4 != 0) return;
        this->each_row([&](int b, int h) {
            const int row = b * 16 + h * 8 + accumulator_row();
            if (row < end) lse[row] = (this->m[b][h] + __log2f(this->l[b][h])) * ln_2;
        });
    }
};
