// An online softmax for which O is not at hand: products still sum into it while the next scores are turned into P.
#pragma once
#include "softmax/online.cuh"

template <int rows>
struct DeferredSoftmax : OnlineSoftmax<rows> {
    float factor[rows / 16][2];  // by which O is yet to be brought down

    // Takes the next block of scores, as OnlineSoftmax does, but for O.
    template <int cols>
    __device__ void update(Accumulator<rows, cols> &s) {
        this->each_row([&](int b, int h) {
            factor[b][h] = this->raise(fmaxf(this->m[b][h], quad_max(this->lane_max(s, b, h)) * this->unit), b, h);
        });
        this->exponentiate(s, this->l);
    }

    // Brings O down to m.
    template <int head_dim>
    __device__ void rescale(Accumulator<rows, head_dim> &o) const {
        OnlineSoftmax<rows>::each_row([&](int b, int h) { OnlineSoftmax<rows>::scale_row(o, b, h, factor[b][h]); });
    }
};
