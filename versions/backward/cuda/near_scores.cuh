// A softcap's tanh by multiply-adds, beside the exponentials of P, where scores are up to 7/16 of the softcap, as nearly all are.
#pragma once
#include "49_every_width/near_softcap.cuh"
#include "softmax/softcap.cuh"

// The scores of a step as Q K^T gives them, and what `weights` makes of each.
template <bool softcap>
struct NearScores : Softcap<false> {
    static constexpr float hidden = -INFINITY;

    using Softcap<false>::Softcap;
};

// With a softcap `apply` leaves y, and an odd polynomial of y is the tanh. Where a warp has far scores, y is the tanh itself and the
// polynomial is y. Each score decides by itself which tanh is its own: its bits do not depend on others.
template <>
struct NearScores<true> : NearSoftcap {
    static constexpr float hidden = INFINITY;  // which both polynomials take to minus infinity
    OddPolynomial tanh_of;

    using NearSoftcap::NearSoftcap;

    // S of a warp, in place.
    template <int cols>
    __device__ void apply(Accumulator<16, cols> &s) {
        uint32_t seen = 0;
        each(s, [&](float &x) {
            x *= steepness;
            seen |= __float_as_uint(x);
        });
        tanh_of = near();
        if (__any_sync(0xffffffff, is_far(seen))) {
            each(s, [](float &x) { x = is_far(__float_as_uint(x)) ? far_tanh(x) : near_tanh(x); });
            tanh_of = {1.0f, 0.0f, 0.0f, -0x1p-80f};
        }
    }
    __device__ float operator()(float y) const { return tanh_of(y); }

  private:
    // Not below 2 in magnitude, or no number.
    static __device__ bool is_far(uint32_t bits) { return bits & 0x40000000; }

    template <int cols, class Visit>
    static __device__ void each(Accumulator<16, cols> &s, Visit visit) {
#pragma unroll
        for (auto &block : s.block[0])
#pragma unroll
            for (float &x : block) visit(x);
    }
};
