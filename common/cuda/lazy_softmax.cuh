// Online softmaxes that touch O only when they must.
#pragma once
#include "softmax.cuh"

// A softmax whose m may lie below the row's maximum, so that P may be larger than 1. The largest P is then no power of
// 2 any more. It is rounded when it becomes an operand of P V, and equal ones are all rounded alike. So there are two
// sums:
// - w, the sum of P as rounded. O is divided by w, so that the weights of a row add up to one. The tensor cores take
//   this sum, as P times a column of ones.
// - l, the sum of P before it is rounded. The log-sum-exp takes l.
template <class T, int rows>
struct WeighedSoftmax : OnlineSoftmax<rows> {
    float w;                       // of one row: four lanes share up to four rows, and each lane keeps the w of one
    Accumulator<rows, 8> block_w;  // of the current block; all columns are alike

    template <int head_dim>
    __device__ void clear(Accumulator<rows, head_dim> &o) {
        OnlineSoftmax<rows>::clear();
        w = 0.0f;
        o.clear();
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

    // O /= w, with one reciprocal per row. A row that has seen no key becomes 0, whatever is in V.
    template <int head_dim>
    __device__ void finish(Accumulator<rows, head_dim> &o) {
        this->each_row([&](int b, int h) {
            this->l[b][h] = quad_sum(this->l[b][h]);
            const float sum = __shfl_sync(0xffffffff, w, owner(b, h), 4), factor = 1.0f / sum;
            this->template each_element<head_dim>(o, b, h, [&](float &x) { x = sum == 0.0f ? 0.0f : x * factor; });
        });
    }

  protected:
    // As `exponentiate`, but the block's sums are taken apart and then added to l. In a long row of equal weights l would
    // otherwise drift: each addition is rounded, and always to the same side.
    template <int cols>
    __device__ void exponentiate_apart(Accumulator<rows, cols> &s) {
        float before[rows / 16][2];
        this->each_row([&](int b, int h) {
            before[b][h] = this->l[b][h];
            this->l[b][h] = 0.0f;
        });
        this->exponentiate(s);
        this->each_row([&](int b, int h) { this->l[b][h] += before[b][h]; });
    }

    // Which of the four lanes keeps the w of row (b, h).
    __device__ static constexpr int owner(int b, int h) { return 2 * b + h; }

    // value(b, h) of the row whose w the lane keeps.
    template <class Value>
    __device__ static float own(Value value) {
        static_assert(rows <= 32, "no more rows than lanes that share them");
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
        rescale_row(o, b, h, exp2_approx(this->m[b][h] - highest));
        this->m[b][h] = highest;
    }
    template <int head_dim>
    __device__ void rescale_row(Accumulator<rows, head_dim> &o, int b, int h, float factor) {
        this->l[b][h] *= factor;
        if (lane_index() % 4 == owner(b, h)) w *= factor;
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
    __device__ void update(Accumulator<rows, cols> &s, Accumulator<rows, head_dim> &o) {
        float highest[rows / 16][2];
        bool passed = false;
        this->each_row([&](int b, int h) {
            highest[b][h] = this->lane_max(s, b, h) * this->unit;
            passed |= highest[b][h] > this->m[b][h] + tolerance;
        });
        if (__any_sync(0xffffffff, passed))
            this->each_row([&](int b, int h) { this->raise(fmaxf(this->m[b][h], quad_max(highest[b][h])), o, b, h); });
        this->exponentiate_apart(s);
    }
};
