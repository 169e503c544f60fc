// Scores in log2, each rounded before anything else is done with it.
#pragma once
#include "softmax/softcap.cuh"

// 2^(scale * S - m) by one fused multiply-add is as wrong as m is rounded, which is a unit and more from 2^24 on. Beside a
// rounded product the maximum is exact, however far from 0. A product by `__fmul_rn` is never fused.
template <bool softcap>
struct ScoresInLog2 : Softcap<softcap> {
    using Softcap<softcap>::Softcap;

    __device__ float operator()(float x) const { return __fmul_rn(Softcap<softcap>::operator()(x), this->scale); }
    // All of S, in place.
    template <int rows, int cols>
    __device__ void apply(Accumulator<rows, cols> &s) const {
#pragma unroll
        for (auto &row : s.block)
#pragma unroll
            for (auto &block : row)
#pragma unroll
                for (float &x : block) x = (*this)(x);
    }
};
