// A softcap's tanh by multiply-adds, where scores are up to 7/16 of the softcap, as nearly all are.
#pragma once
#include "softmax/softcap.cuh"

// As Softcap. A lane's keys of a row, of a block, decide, and no other row. Where a mask may hide some of them none is near: a
// row's bits do not depend on what it does not see.
struct NearSoftcap {
    static constexpr float reach = 0.4375f;  // of score / softcap
    static constexpr int together = 4;       // elements whose chains of multiply-adds take turns
    float scale, steepness;                  // steepness times a score at the end of `reach` is 2

    template <class Params>
    __device__ explicit NearSoftcap(const Params &params)
        : scale(params.softcap * log2_e),
          steepness(fminf(__fdividef(2.0f / reach * params.softmax_scale, params.softcap), 0x1p127f)) {}  // 0 times inf is NaN

    template <bool may_hide, int rows, int cols>
    __device__ void apply(Accumulator<rows, cols> &s) const {
#pragma unroll
        for (auto &row : s.block)
            each_row([&](int h) { apply_to_row<may_hide>(row, h); });
    }

  private:
    // tanh(reach / 2 * x) for |x| < 2, in place: of the odd polynomials of degree 7 the one with the least error, 2^-21.7;
    // Softcap has 2^-22.4. ptxas would put each element's chain behind the one before it, and each step waits for the last.
    static __device__ void near_tanh(float *const (&x)[together]) {
        constexpr float odd[] = {0.218749955f, -0.00348883169f, 6.63477404e-05f, -1.1126009e-06f};
        float square[together], sum[together];
#pragma unroll
        for (int e = 0; e < together; ++e) square[e] = *x[e] * *x[e], sum[e] = odd[3];
#pragma unroll
        for (int i = 2; i >= 0; --i)
#pragma unroll
            for (int e = 0; e < together; ++e) sum[e] = fmaf(sum[e], square[e], odd[i]);
#pragma unroll
        for (int e = 0; e < together; ++e) *x[e] *= sum[e];
    }
    // The same of any x, as Softcap has it.
    static __device__ float far_tanh(float x) {
        return 1.0f - 2.0f * reciprocal_approx(1.0f + exp2_approx(x * (reach * log2_e)));
    }
    template <bool may_hide, int blocks>
    __device__ void apply_to_row(float (&s)[blocks][4], int h) const {
        static_assert(blocks % 2 == 0, "two blocks have four of a lane's elements of a row");
        uint32_t seen = 0;
        each_element(s, h, [&](float &x) {
            x *= steepness;
            seen |= __float_as_uint(x);
        });
        if (!may_hide && !(seen & 0x40000000)) {  // all are below 2 in magnitude, and numbers
#pragma unroll
            for (int n = 0; n < blocks; n += 2)
                near_tanh({&s[n][2 * h], &s[n][2 * h + 1], &s[n + 1][2 * h], &s[n + 1][2 * h + 1]});
        } else {
            each_element(s, h, [](float &x) { x = far_tanh(x); });
        }
    }
    template <int blocks, class Visit>
    static __device__ void each_element(float (&s)[blocks][4], int h, Visit visit) {
#pragma unroll
        for (auto &block : s) visit(block[2 * h]), visit(block[2 * h + 1]);
    }
};
