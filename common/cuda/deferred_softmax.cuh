// An online softmax for which O is not at hand: products still sum into it while the next scores are turned into P.
#pragma once
#include "softmax.cuh"

template <int rows>
struct DeferredSoftmax : OnlineSoftmax<rows> {
    float factor[rows / 16][2];  // by which O is yet to be brought down

    // Takes the next block of scores, as OnlineSoftmax does, but for O.
    template <int cols>
    __device__ void update(Accumulator<rows, cols> &s) {
        this->each_row([&](int b, int h) {
            const float highest = fmaxf(this->m[b][h], quad_max(this->lane_max(s, b, h)) * this->unit);
            factor[b][h] = exp2_approx(this->m[b][h] - highest);
            this->m[b][h] = highest;
            this->l[b][h] *= factor[b][h];
        });
        this->exponentiate(s);
    }

    // Brings O down to m.
    template <int head_dim>
    __device__ void rescale(Accumulator<rows, head_dim> &o) const {
        OnlineSoftmax<rows>::each_row([&](int b, int h) { OnlineSoftmax<rows>::scale_row(o, b, h, factor[b][h]); });
    }

    // Writes the log-sum-exp of those of the warp's rows that are below `end`.
    __device__ void store_lse(float *lse, int end) const {
        if (lane_index() % 4 != 0) return;
        OnlineSoftmax<rows>::each_row([&](int b, int h) {
            const int row = b * 16 + h * 8 + accumulator_row();
            if (row < end) lse[row] = (this->m[b][h] + __log2f(this->l[b][h])) * ln_2;
        });
    }
    using OnlineSoftmax<rows>::store_lse;
};
