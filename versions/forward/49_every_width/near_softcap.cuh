// A softcap's tanh by multiply-adds, where scores are up to 3/4 of the softcap, as nearly all are.
#pragma once
#include "softmax/softcap.cuh"

// As Softcap. A lane's keys of a row, of a block, decide, and no other row; also keys that a mask hides are asked.
struct NearSoftcap {
    static constexpr float reach = 0.75f;  // of score / softcap
    float scale, steepness;                // steepness times a score at the end of `reach` is 2

    template <class Params>
    __device__ explicit NearSoftcap(const Params &params)
        : scale(params.softcap * log2_e),
          steepness(fminf(__fdividef(2.0f / reach * params.softmax_scale, params.softcap), 0x1p127f)) {}  // 0 times inf is NaN

    template <int rows, int cols>
    __device__ void apply(Accumulator<rows, cols> &s) const {
#pragma unroll
        for (auto &row : s.block)
            each_row([&](int h) { apply_to_row(row, h); });
    }

  private:
    // tanh(reach / 2 * x) for |x| < 2: of the odd polynomials of degree 9 that begin as tanh does, the one with the least error,
    // 2^-21.6; Softcap has 2^-22.4.
    static __device__ float near_tanh(float x) {
        constexpr float odd[] = {0.375f, -0.0175753366f, 0.000982839148f, -5.20024914e-05f, 1.8698704e-06f};
        const float square = x * x;
        float sum = odd[4];
#pragma unroll
        for (int i = 3; i >= 0; --i) sum = fmaf(sum, square, odd[i]);
        return x * sum;
    }
    // The same of any x, as Softcap has it.
    static __device__ float far_tanh(float x) {
        return 1.0f - 2.0f * reciprocal_approx(1.0f + exp2_approx(x * (reach * log2_e)));
    }
    template <int blocks>
    __device__ void apply_to_row(float (&s)[blocks][4], int h) const {
        uint32_t seen = 0;
        each_element(s, h, [&](float &x) {
            x *= steepness;
            seen |= __float_as_uint(x);
        });
        if (!(seen & 0x40000000))  // all are below 2 in magnitude, and numbers
            each_element(s, h, [](float &x) { x = near_tanh(x); });
        else
            each_element(s, h, [](float &x) { x = far_tanh(x); });
    }
    template <int blocks, class Visit>
    static __device__ void each_element(float (&s)[blocks][4], int h, Visit visit) {
#pragma unroll
        for (auto &block : s) visit(block[2 * h]), visit(block[2 * h + 1]);
    }
};
