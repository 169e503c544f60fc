// Scores, in log2: as Q K^T gives them, or bounded by a softcap.
#pragma once
#include "launch.cuh"
#include "ptx/sm80.cuh"
#include "tile/rows.cuh"

constexpr float log2_e = 1.4426950408889634f;
constexpr float ln_2 = 0.6931471805599453f;

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
    // All of S, in place.
    template <int cols>
    __device__ void apply(Accumulator<16, cols> &s) const {
        if constexpr (softcap)
#pragma unroll
            for (auto &block : s.block[0])
#pragma unroll
                for (float &x : block) x = 1.0f - 2.0f * reciprocal_approx(1.0f + exp2_approx(x * steepness));
    }
};
