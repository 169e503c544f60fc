// Online softmaxes that touch O only when they must.
#pragma once
#include "softmax.cuh"

// Raises m only when a score passes it by 2^8 or more: until then P and l are larger than 1, which floating point does
// not mind, and O needs no rescaling. One vote a warp and block, no shuffles. (FlashAttention-4's conditional rescaling.)
template <int rows>
struct LazySoftmax : OnlineSoftmax<rows> {
    static constexpr float tolerance = 8.0f;  // log2

    template <int cols, int head_dim>
    __device__ void update(Accumulator<rows, cols> &s, Accumulator<rows, head_dim> &o) {
        float highest[rows / 16][2];
        bool passed = false;
        this->each_row([&](int b, int h) {
            highest[b][h] = this->lane_max(s, b, h) * this->unit;
            passed |= highest[b][h] > this->m[b][h] + tolerance;
        });
        if (__any_sync(0xffffffff, passed))
            this->each_row([&](int b, int h) { this->raise(fmaxf(this->m[b][h], quad_max(highest[b][h])), o, b, h); });
        this->exponentiate(s);
    }
};

// What P may grow to. P = 2^(S - m) is rounded to T, so it must stay within T's range: fp16 ends at 2^16, so there m is
// kept `bias` above the maximum it stands for; what that costs at the other end is lost in the rounding of O.
template <class T>
struct Range;
template <>
struct Range<__nv_bfloat16> {
    static constexpr float bias = 0.0f;
    static constexpr float large = 0x1p40f;   // sums from here on move the anchor
    static constexpr float lost = 0x1p100f;   // sums from here on may have met a P or an O past the range
};
template <>
struct Range<__half> {
    static constexpr float bias = 10.0f;
    static constexpr float large = 0x1p8f;
    static constexpr float lost = 0x1p15f;
};

// Looks for no maximum at all after the first block: m is an anchor, taken from that block, which only keeps the
// exponentials within range. Whether it still does, the sums l tell. When a block brings scores so far above all before
// that a P may have overflowed, `settle` says so, and the caller computes the tile again with OnlineSoftmax::update.
template <class T, int rows>
struct AnchoredSoftmax : OnlineSoftmax<rows> {
    using Limit = Range<T>;

    template <int cols>
    __device__ void start(Accumulator<rows, cols> &s) {
        this->each_row([&](int b, int h) {
            this->m[b][h] = quad_max(this->lane_max(s, b, h)) * this->unit + Limit::bias;
            this->l[b][h] = 0.0f;
        });
        this->exponentiate(s);
    }

    // S becomes P, and nothing else has to be known: the tensor cores go on in its wake.
    template <int cols>
    __device__ void add(Accumulator<rows, cols> &s) {
        this->exponentiate(s);
    }

    // After a block's P V: moves the anchor where a sum has grown large. True when something may have been lost.
    template <int head_dim>
    __device__ bool settle(Accumulator<rows, head_dim> &o) {
        float largest = 0.0f;
        this->each_row([&](int b, int h) { largest = fmaxf(largest, this->l[b][h]); });
        if (!__any_sync(0xffffffff, !(largest < Limit::large))) return false;
        bool lost = false;
        this->each_row([&](int b, int h) {
            const float sum = quad_max(this->l[b][h]);
            lost |= !(sum < Limit::lost);
            this->raise(this->m[b][h] + fmaxf(__log2f(sum) + Limit::bias, 0.0f), o, b, h);
        });
        return lost;
    }
};
