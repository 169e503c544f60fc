// An online softmax for rows of which some scores, or all, are hidden.
#pragma once
#include <float.h>

#include "anchored_softmax.cuh"

// Until a row has been shown a score that is not hidden, m is the lowest finite number, for which hidden scores, -inf, are
// exponentials of 0, and which the first other score raises. A row that sees no key ends with O = 0 and a log-sum-exp of
// -inf.
template <class T, int rows>
struct MaskedSoftmax : AnchoredSoftmax<T, rows> {
    template <int head_dim>
    __device__ void clear(Accumulator<rows, head_dim> &o) {
        AnchoredSoftmax<T, rows>::clear(o);
        this->each_row([&](int b, int h) { this->m[b][h] = -FLT_MAX; });
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
