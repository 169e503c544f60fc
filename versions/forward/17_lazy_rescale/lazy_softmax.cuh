// Online softmaxes that touch O only when they must.
#pragma once
#include <float.h>

#include "softmax/online.cuh"

// A softmax whose m may lie below the row's maximum, so that P may be larger than 1. The largest P is then no power of
// 2 any more. It is rounded when it becomes an operand of P V, and equal ones are all rounded alike. So there are two
// sums:
// - w, the sum of P as rounded. O is divided by w, so that the weights of a row add up to one. The tensor cores take
//   this sum, as P times a column of ones.
// - l, the sum of P before it is rounded. The log-sum-exp takes l, and nothing else does. In a long row of equal weights
//   l would drift: each addition is rounded, and always to the same side. So the sums of each `group` blocks are taken
//   apart, and then added up.
template <class T, int rows>
struct WeighedSoftmax : OnlineSoftmax<rows> {
    static constexpr int group = 16;
    float older_l[rows / 16][2];   // of the groups before
    float w;                       // of one row: the lanes that share some rows keep the w of one each
    Accumulator<rows, 8> block_w;  // of the current block; all columns are alike

    // A hidden score is -inf. Until a row has been shown another score, its m is the lowest finite number, so that hidden
    // scores weigh 0. (With an infinity for m, their difference would be NaN.)
    template <int head_dim>
    __device__ void clear(Accumulator<rows, head_dim> &o) {
        this->each_row([&](int b, int h) {
            this->m[b][h] = -FLT_MAX;
            this->l[b][h] = older_l[b][h] = 0.0f;
        });
        w = 0.0f;
        o.clear();
    }

    // Begins a new group of l, if one begins with block j.
    __device__ void begin_group(int j) {
        if (j % group != 0) return;
        this->each_row([&](int b, int h) {
            older_l[b][h] += this->l[b][h];
            this->l[b][h] = 0.0f;
        });
    }

    // Adds k-step `step` of P to block_w. The last step of a block adds block_w to w.
    template <int cols>
    __device__ void weigh(const HeldA<rows, cols> &p, int step) {
        const uint32_t ones = pack<T>(1.0f, 1.0f);
        if (step == 0) block_w.clear();
#pragma unroll
        for (int b = 0; b < rows / 16; ++b) mma_m16n8k16<T>(block_w.block[b][0], p.at(step, b), ones, ones);
        if (step == cols / 16 - 1) w += own([&](int b, int h) { return block_w.block[b][0][2 * h]; });
    }

    // O /= w, with one reciprocal per row. A row that has seen no key becomes 0, whatever is in V, and its log-sum-exp -inf.
    template <int head_dim>
    __device__ void finish(Accumulator<rows, head_dim> &o) {
        this->each_row([&](int b, int h) {
            this->l[b][h] = quad_sum(this->l[b][h] + older_l[b][h]);
            const float sum = row_w(b, h), factor = 1.0f / sum;
            this->template each_element<head_dim>(o, b, h, [&](float &x) { x = sum == 0.0f ? 0.0f : x * factor; });
        });
    }

  protected:
    // Rows of the accumulators that four lanes share. If there are fewer than four, some lanes keep the same w.
    static constexpr int shared_rows = rows / 8;

    __device__ static bool keeps(int b, int h) { return lane_index() % shared_rows == 2 * b + h; }
    __device__ float row_w(int b, int h) const { return __shfl_sync(0xffffffff, w, 2 * b + h, 4); }

    // value(b, h) of the row whose w the lane keeps.
    template <class Value>
    __device__ static float own(Value value) {
        static_assert(shared_rows <= 4, "no more rows than lanes that share them");
        const bool odd = lane_index() & 1, upper = lane_index() & 2;
        const float low = odd ? value(0, 1) : value(0, 0);
        if constexpr (rows == 16)
            return low;
        else
            return upper ? (odd ? value(1, 1) : value(1, 0)) : low;
    }

    // Sets m of one row to `highest`, and brings what was summed before down to it.
    template <int head_dim>
    __device__ void raise(float highest, Accumulator<rows, head_dim> &o, int b, int h) {
        const float factor = OnlineSoftmax<rows>::raise(highest, b, h);
        older_l[b][h] *= factor;
        if (keeps(b, h)) w *= factor;
        this->scale_row(o, b, h, factor);
    }
};

// How far a score may pass m, in log2, before m is raised. P stays below 2^15: fp16 ends at 2^16.
constexpr float tolerance = 15.0f;

// Raises m only when a score has passed it by more than the tolerance. Until then O needs no rescaling. This takes one
// vote per warp and block, and no shuffles. (FlashAttention-4's conditional rescaling.)
template <class T, int rows>
struct LazySoftmax : WeighedSoftmax<T, rows> {
    template <int cols, int head_dim>
    __device__ void update(Accumulator<rows, cols> &s, Accumulator<rows, head_dim> &o, int j) {
        this->begin_group(j);
        float highest[rows / 16][2];
        bool passed = false;
        this->each_row([&](int b, int h) {
            highest[b][h] = this->lane_max(s, b, h) * this->unit;
            passed |= highest[b][h] > this->m[b][h] + tolerance;
        });
        if (__any_sync(0xffffffff, passed))
            this->each_row([&](int b, int h) { this->raise(fmaxf(this->m[b][h], quad_max(highest[b][h])), o, b, h); });
        this->exponentiate(s, this->l);
    }
};
