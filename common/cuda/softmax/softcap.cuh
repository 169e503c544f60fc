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
//
// With `by_polynomial` scores up to 3/4 of the softcap, which nearly all are, take none of these: a polynomial has the
// same error, by multiply-adds alone. It is a lane's keys of a row, of a block, that decide, so rows stay independent.
template <bool softcap, bool by_polynomial = false>
struct Softcap {
    static constexpr float reach = 0.75f;  // of x, for the polynomial; at its end `in_reach` is 2
    float scale, steepness;                // steepness times a score is 2 log2(e) x, or 2 x / reach

    template <class Params>
    __device__ explicit Softcap(const Params &params) {
        if constexpr (softcap) {
            scale = params.softcap * log2_e;
            constexpr float factor = 2.0f * (by_polynomial ? 1.0f / reach : log2_e);
            steepness = fminf(__fdividef(factor * params.softmax_scale, params.softcap), 0x1p127f);  // 0 times inf is NaN
        } else {
            scale = params.softmax_scale * log2_e;
        }
    }
    __device__ float operator()(float x) const {
        if constexpr (softcap)
            return far_tanh(x * steepness * (by_polynomial ? reach * log2_e : 1.0f));
        else
            return x;
    }
    // All of S, in place.
    template <int rows, int cols>
    __device__ void apply(Accumulator<rows, cols> &s) const {
        if constexpr (softcap && by_polynomial)
#pragma unroll
            for (int m = 0; m < rows / 16; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) apply_to_row(s.block[m], h);
        else if constexpr (softcap)
#pragma unroll
            for (auto &row : s.block)
#pragma unroll
                for (auto &block : row)
#pragma unroll
                    for (float &x : block) x = (*this)(x);
    }

  private:
    static __device__ float far_tanh(float in_log) { return 1.0f - 2.0f * reciprocal_approx(1.0f + exp2_approx(in_log)); }
    // tanh(reach / 2 * x) for |x| < 2: of the odd polynomials of degree 9 that begin as tanh does, the one with the least error.
    static __device__ float near_tanh(float x) {
        constexpr float odd[] = {0.375f, -0.0175753366f, 0.000982839148f, -5.20024914e-05f, 1.8698704e-06f};
        const float square = x * x;
        float sum = odd[4];
#pragma unroll
        for (int i = 3; i >= 0; --i) sum = fmaf(sum, square, odd[i]);
        return x * sum;
    }
    // The lane's keys of one of the two rows that it has.
    template <int blocks>
    __device__ void apply_to_row(float (&s)[blocks][4], int h) const {
        uint32_t seen = 0;
#pragma unroll
        for (auto &block : s)
#pragma unroll
            for (int i = 2 * h; i < 2 * h + 2; ++i) {
                block[i] *= steepness;
                seen |= __float_as_uint(block[i]);
            }
        const bool is_near = !(seen & 0x40000000);  // all are below 2 in magnitude, and numbers
        if (is_near)
#pragma unroll
            for (auto &block : s)
#pragma unroll
                for (int i = 2 * h; i < 2 * h + 2; ++i) block[i] = near_tanh(block[i]);
        else
#pragma unroll
            for (auto &block : s)
#pragma unroll
                for (int i = 2 * h; i < 2 * h + 2; ++i) block[i] = far_tanh(block[i] * (reach * log2_e));
    }
};
