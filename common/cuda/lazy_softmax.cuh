// Online softmaxes that touch O only when they must.
#pragma once
#include "softmax.cuh"

// Raises m only when a score passes it by 2^8 or more: until then P and l are larger than 1, which floating point does
// not mind, and O needs no rescaling. One vote a warp and block, no shuffles. (FlashAttention-4's conditional rescaling.)
// With a `bias`, m is kept that much above the maximum it stands for.
template <int rows, int bias = 0>
struct LazySoftmax : OnlineSoftmax<rows> {
    static constexpr float tolerance = 8.0f;  // log2

    template <int cols, int head_dim>
    __device__ void update(Accumulator<rows, cols> &s, Accumulator<rows, head_dim> &o) {
        float highest[rows / 16][2];
        bool passed = false;
        this->each_row([&](int b, int h) {
            highest[b][h] = this->lane_max(s, b, h) * this->unit + bias;
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
    static constexpr int bias = 0;
    static constexpr float large = 0x1p40f;   // sums from here on move the anchor
    static constexpr float lost = 0x1p100f;   // sums from here on may have met a P or an O past the range
};
template <>
struct Range<__half> {
    static constexpr int bias = 10;
    static constexpr float large = 0x1p8f;
    static constexpr float lost = 0x1p15f;
};

// Looks for no maximum at all where `add` takes the scores: m is an anchor, left there by `update`, which only keeps the
// exponentials within range. Whether it still does, the sums l tell. When a block brings scores so far above all before
// that a P may have overflowed, the row is `lost`, and the caller computes the tile again with every block updated.
template <class T, int rows>
struct AnchoredSoftmax : LazySoftmax<rows, Range<T>::bias> {
    using Limit = Range<T>;

    // S becomes P, and nothing else has to be known: the tensor cores go on in its wake.
    template <int cols>
    __device__ void add(Accumulator<rows, cols> &s) {
        this->exponentiate(s);
    }

    // The same bit by bit: part `part` of `parts` of chunk `step`, columns 16 * step ... of S, becomes an operand of P V.
    template <int cols>
    __device__ void add_part(const Accumulator<rows, cols> &s, HeldA<rows, cols> &p, int step, int part, int parts) {
        constexpr int pairs = rows / 4;  // of a lane's elements in a chunk
#pragma unroll
        for (int pair = part * pairs / parts; pair < (part + 1) * pairs / parts; ++pair) {
            const int b = pair / 4, i = pair % 4, h = i % 2;
            const float(&block)[4] = s.block[b][step * 2 + i / 2];
            const float left = exp2_approx(block[2 * h] * this->unit - this->m[b][h]);
            const float right = exp2_approx(block[2 * h + 1] * this->unit - this->m[b][h]);
            this->l[b][h] += left;
            this->l[b][h] += right;
            p.block[step][b][i] = pack<T>(left, right);
        }
    }

    // After a block's P V: moves the anchor where a sum has grown large; past all use where something may be lost.
    template <int head_dim>
    __device__ void settle(Accumulator<rows, head_dim> &o) {
        float largest = 0.0f;
        this->each_row([&](int b, int h) { largest = fmaxf(largest, this->l[b][h]); });
        if (!__any_sync(0xffffffff, !(largest < Limit::large))) return;
        this->each_row([&](int b, int h) {
            const float sum = quad_max(this->l[b][h]);
            const float up = sum < Limit::lost ? fmaxf(__log2f(sum) + Limit::bias, 0.0f) : NAN;
            this->raise(this->m[b][h] + up, o, b, h);
        });
    }

    // Whether a row of this lane has been lost, after the last block.
    __device__ bool lost() const {
        bool any = false;
        this->each_row([&](int b, int h) { any |= !(this->l[b][h] < INFINITY); });
        return any;
    }
};
