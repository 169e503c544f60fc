// The scores of a step behind a softcap, with the fewest instructions.
#pragma once
#include "softmax/softcap.cuh"

// As Softcap, to the bit: 2 r is exact, so 1 - 2 r rounds once either way, but nvcc makes two additions of it.
template <bool softcap>
struct CappedScores : Softcap<softcap> {
    static constexpr float hidden = -INFINITY;

    using Softcap<softcap>::Softcap;

    __device__ float operator()(float tanh) const { return tanh; }  // what `apply` has left

    // S of a warp, in place.
    template <int cols>
    __device__ void apply(Accumulator<16, cols> &s) const {
        if constexpr (softcap)
#pragma unroll
            for (auto &block : s.block[0])
#pragma unroll
                for (float &x : block) x = fmaf(-2.0f, reciprocal_approx(1.0f + exp2_approx(x * this->steepness)), 1.0f);
    }
};
