// An online softmax for rows of which some scores, or all, are hidden.
#pragma once
#include "anchored_softmax.cuh"

// A hidden score is -inf. Until a row has been shown another score, its m is the lowest finite number: hidden scores
// weigh 0. The first score that is not hidden raises m. A row that sees no key ends with O = 0 and a log-sum-exp of
// -inf.
template <class T, int rows>
struct MaskedSoftmax : AnchoredSoftmax<T, rows> {
    // Writes the log-sum-exp of the warp's rows before row `end`, in natural logarithms.
    __device__ void store_lse(float *lse, int end) const {
        if (lane_index() % 4 != 0) return;
        this->each_row([&](int b, int h) {
            const int row = b * 16 + h * 8 + accumulator_row();
            if (row < end) lse[row] = (this->m[b][h] + __log2f(this->l[b][h])) * ln_2;
        });
    }
};
