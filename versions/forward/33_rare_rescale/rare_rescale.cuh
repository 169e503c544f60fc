// A deferred softmax that seldom brings O down: m may stay below the running maximum.
#pragma once
#include <float.h>

#include "30_softmax_under_products/deferred.cuh"

// Softmax needs some m that keeps 2^(S - m) within range, not the maximum. m is raised, for all rows of a warp, once some
// maximum has passed it by more than `slack` in log2. P is at most 2^slack then, which fp16 holds as well as bf16. Hidden
// scores, -inf, weigh 0: until a row has been shown another one, its m is the lowest finite number.
//
// Equal scores above m would all be rounded to the same side as operands of P V, while l sums P before it is rounded. So
// m is raised too if a lane's P are above 1 on average. Then the largest P are 1, which is not rounded.
template <int rows, class Base = DeferredSoftmax<rows>>
struct RarelyRescaled : Base {
    static constexpr float slack = 8.0f;
    bool raised;                 // with the last block of scores
    float missed[rows / 16][2];  // what rounding has added to l too much: P above 1 are no whole multiples of it

    // Before a tile of which no row may see a key.
    __device__ void clear() {
        this->each_row([&](int b, int h) {
            this->m[b][h] = -FLT_MAX;
            this->l[b][h] = missed[b][h] = 0.0f;
        });
    }

    template <int cols>
    __device__ void start(Accumulator<rows, cols> &s) {
        this->each_row([&](int b, int h) {
            this->m[b][h] = fmaxf(quad_max(this->lane_max(s, b, h)) * this->unit, -FLT_MAX);
            this->l[b][h] = missed[b][h] = 0.0f;
        });
        float sum[rows / 16][2];
        exponentiate(s, sum);
        add(sum);
    }

    template <int cols>
    __device__ void update(Accumulator<rows, cols> &s) {
        float sum[rows / 16][2];
        raise_to_maxima(s);
        exponentiate(s, sum);
        if (any_above(raised ? INFINITY : ones<cols>, sum)) scale_down(s, sum);
        add(sum);
    }

    template <int head_dim>
    __device__ void rescale(Accumulator<rows, head_dim> &o) const {
        if (raised) Base::rescale(o);
    }

    // O /= l; of a row that sees no key, O = 0, whatever is in V.
    template <int head_dim>
    __device__ void finish_by_reciprocal(Accumulator<rows, head_dim> &o) {
        this->each_row([&](int b, int h) {
            this->l[b][h] = quad_sum(this->l[b][h]);
            const bool sees_none = this->l[b][h] == 0.0f;
            const float reciprocal = 1.0f / this->l[b][h];
            this->template each_element<head_dim>(o, b, h, [&](float &x) { x = sees_none ? 0.0f : x * reciprocal; });
        });
    }

    // Always true, which the compiler cannot know: it is told from l, so all of P is there first. (A NaN is not below 0.)
    __device__ bool is_summed() const { return !(this->l[0][0] + this->l[0][1] < 0.0f); }

  protected:
    // A lane's sum of a row if each P is 1, and what rounding m may add to it.
    template <int cols>
    static constexpr float ones = cols / 4 * 1.001f;

    // Raises m to the maxima once one has passed it by more than the slack.
    template <int cols>
    __device__ void raise_to_maxima(const Accumulator<rows, cols> &s) {
        float highest[rows / 16][2];
        bool passed = false;
        this->each_row([&](int b, int h) {
            highest[b][h] = quad_max(this->lane_max(s, b, h)) * this->unit;
            passed |= highest[b][h] - this->m[b][h] > slack;
        });
        raised = __any_sync(0xffffffff, passed);
        if (raised) this->each_row([&](int b, int h) { raise_to(b, h, fmaxf(this->m[b][h], highest[b][h])); });
    }

    // A sum that is NaN is above nothing: its row is lost, and must not move the others of its warp.
    __device__ bool any_above(float limit, const float (&sum)[rows / 16][2]) {
        bool above = false;
        this->each_row([&](int b, int h) { above |= sum[b][h] > limit; });
        return __any_sync(0xffffffff, above);
    }

    // Raises m by the block's largest P of each row, and brings down what was computed with the old m.
    template <int cols>
    __device__ void scale_down(Accumulator<rows, cols> &s, float (&sum)[rows / 16][2]) {
        raised = true;
        this->each_row([&](int b, int h) {
            raise_to(b, h, this->m[b][h] + fmaxf(__log2f(quad_max(this->lane_max(s, b, h))), 0.0f));
            this->scale_row(s, b, h, this->factor[b][h]);
            sum[b][h] *= this->factor[b][h];
        });
    }

    // Sets m of a row, and brings l down to it; O is yet to follow.
    __device__ void raise_to(int b, int h, float m) {
        this->factor[b][h] = this->raise(m, b, h);
        missed[b][h] *= this->factor[b][h];
    }

    // Turns S into P, and gives the block's own sums.
    template <int cols>
    __device__ void exponentiate(Accumulator<rows, cols> &s, float (&sum)[rows / 16][2]) {
        this->each_row([&](int b, int h) { sum[b][h] = 0.0f; });
        Base::exponentiate(s, sum);
    }

    // Adds a block's sums to l, and keeps what rounding loses (Kahan, 1965).
    __device__ void add(const float (&sum)[rows / 16][2]) {
        this->each_row([&](int b, int h) {
            const float added = sum[b][h] - missed[b][h], l = this->l[b][h] + added;
            missed[b][h] = l - this->l[b][h] - added;
            this->l[b][h] = l;
        });
    }
};
