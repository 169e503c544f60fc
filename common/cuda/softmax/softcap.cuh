// Scores, in log2: as Q K^T gives them, or bounded by a softcap.
#pragma once
#include "launch.cuh"
#include "ptx/sm80.cuh"
#include "softmax/log2.cuh"
#include "tile/fragment.cuh"

// The parameters of a kernel that has a window, a softcap, or both. A side without an end has a window of 2^30 keys.
template <class Params>
struct Bounded : Params {
    int window_left, window_right;  // keys before a row's own, and behind it
    float softcap;
    FLASHLADDER_FURTHER_FIELDS(Params, window_left, window_right, softcap)
};

// Scores as they are, `scale` each in log2; or softcap * tanh(score / softcap). tanh(x) is 1 - 2 / (1 + e^2x): an
// exponential and a reciprocal. Its error is some 2^-22, and the log-sum-exp needs that: tanh.approx has 2^-11.
template <bool softcap>
struct Softcap {
    float scale, steepness;

    template <class Params>
    __device__ explicit Softcap(const Params &params) {
        if constexpr (softcap) {
            scale = params.softcap * log2_e;
            steepness = fminf(__fdividef(2.0f * log2_e * params.softmax_scale, params.softcap), 0x1p127f);  // 0 times inf is NaN
        } else {
            scale = params.softmax_scale * log2_e;
        }
    }
    __device__ float operator()(float x) const {
        if constexpr (softcap)
            return 1.0f - 2.0f * reciprocal_approx(1.0f + exp2_approx(x * steepness));
        else
            return x;
    }
    // All of S, in place.
    template <int rows, int cols>
    __device__ void apply(Accumulator<rows, cols> &s) const {
        if constexpr (softcap)
#pragma unroll
            for (auto &row : s.block)
#pragma unroll
                for (auto &block : row)
#pragma unroll
                    for (float &x : block) x = (*this)(x);
    }
};
