// A softcap's tanh by multiply-adds, where scores are up to 7/16 of the softcap, as nearly all are.
#pragma once
#include "softmax/softcap.cuh"
#include "tile/rows.cuh"

// a x + b x^3 + c x^5 + d x^7
struct OddPolynomial {
    float a, b, c, d;

    __device__ float operator()(float x) const {
        const float square = x * x;
        const float sum = fmaf(fmaf(d, square, c), square, b);
        return x * fmaf(sum, square, a);
    }
};

// As Softcap. For the softmax a lane's keys of a row, of a block, decide, and no other row.
struct NearSoftcap {
    static constexpr float reach = 0.4375f;  // of score / softcap
    float scale, steepness;                  // steepness times a score at the end of `reach` is 2

    template <class Params>
    __device__ explicit NearSoftcap(const Params &params)
        : scale(params.softcap * log2_e),
          steepness(fminf(__fdividef(2.0f / reach * params.softmax_scale, params.softcap), 0x1p127f)) {}  // 0 times inf is NaN

    // All of S, in place. None is near: a mask may hide some, and a row's bits do not depend on what it does not see.
    template <int cols>
    __device__ void apply(Accumulator<16, cols> &s) const {
        each_row([&](int h) { each_element(s, h, [&](float &x) { x = far_tanh(x * steepness); }); });
    }
    // Those of row h, for the softmax: visit(of_score). It takes an element's exponential beside the next one's multiply-adds. In
    // a loop of their own, ptxas puts each element's chain of these behind the one before it.
    template <int cols, class Visit>
    __device__ void of_row(Accumulator<16, cols> &s, int h, Visit visit) const {
        uint32_t seen = 0;
        each_element(s, h, [&](float &x) {
            x *= steepness;
            seen |= __float_as_uint(x);
        });
        if (seen & 0x40000000)  // some are not below 2 in magnitude, or no numbers
            visit([](float x) { return far_tanh(x); });
        else
            visit([](float x) { return near_tanh(x); });
    }

    // tanh(reach / 2 * x) for |x| < 2: of the odd polynomials of degree 7 the one with the least error, 2^-21.7; Softcap has
    // 2^-22.4.
    static __device__ OddPolynomial near() { return {0.218749955f, -0.00348883169f, 6.63477404e-05f, -1.1126009e-06f}; }
    static __device__ float near_tanh(float x) { return near()(x); }
    // The same of any x, as Softcap has it.
    static __device__ float far_tanh(float x) {
        return 1.0f - 2.0f * reciprocal_approx(1.0f + exp2_approx(x * (reach * log2_e)));
    }
};
