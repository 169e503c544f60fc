// An online softmax that looks for no maxima: it computes P with the m that it has, and the sums of P tell whether m was
// too low. Then, which is rare, P is corrected.
#pragma once
#include <float.h>

#include "ptx/sm90.cuh"
#include "softmax/log2.cuh"
#include "softmax/origins.cuh"
#include "tile/rows.cuh"

// P = 2^(scale * S - m) needs some m that keeps it within range, not the maximum. In fp32, P of a score that has passed m by
// far is as exact as any. Only as an operand of P V it must be small: fp16 ends at 2^16. And equal P above 1 would all be
// rounded to the same side, while l sums P before it is rounded; P of 1 is not rounded. So m is raised, for all rows of a
// warp, if a lane's P are above 1 on average.
//
// Hidden scores, -inf, weigh 0: until a row has been shown another one, its m is the lowest finite number.
struct OptimisticSoftmax {
    static constexpr float slack = 8.0f;     // in log2: how far a maximum that is looked for may pass m
    static constexpr float lost = 0x1p120f;  // a sum above it has lost its scores: what scales P down is at least 2^-126
    float scale;                             // of scores, in log2
    float m[2], l[2];                        // of l a lane has its own share
    Origins origins;                         // that m counts from
    float rounding[2];                       // what rounding has added to l too much
    float factor[2];                         // by which O is yet to be scaled
    bool raised;                             // m, with the last block of scores
    bool looks_for_maxima;                   // in this tile, as it has lost scores
    float reciprocal[2];                     // 1 / l
    bool sees_none;                          // some row of this warp

    // Before a tile of which no row may see a key.
    __device__ void reset() {
        each_row([&](int h) {
            m[h] = -FLT_MAX;
            l[h] = rounding[h] = 0.0f;
        });
        origins.clear();
        looks_for_maxima = false;
    }

    // The first block of scores: S becomes P.
    template <int cols>
    __device__ void start(Accumulator<16, cols> &s) {
        each_row([&](int h) {
            begin(h, row_max(s, h));
            l[h] = rounding[h] = 0.0f;
        });
        origins.look();
        float sum[2];
        exponentiate(s, sum);
        add(sum);
    }

    // Whether some row of the warp has not been shown a score that it sees, so that it has no m yet.
    __device__ bool has_new_rows() const {
        bool is_new = false;
        each_row([&](int h) { is_new |= m[h] == -FLT_MAX; });
        return __any_sync(0xffffffff, is_new);
    }

    // A further block: S becomes P. `recompute` brings S back. Its maxima are looked for if the caller asks for it.
    template <int cols, class Recompute>
    __device__ void update(Accumulator<16, cols> &s, Recompute recompute, bool look_for_maxima = false) {
        float sum[2];
        raised = false;
        if (looks_for_maxima || look_for_maxima) raise_to_maxima(s);
        exponentiate(s, sum);
        if (any_above(raised ? INFINITY : ones<cols>, sum)) correct(s, sum, recompute);
        add(sum);
    }

    // O follows m.
    template <int head_dim>
    __device__ void rescale(Accumulator<16, head_dim> &o) const {
        if (raised) each_row([&](int h) { scale_row(o, h, factor[h]); });
    }

    // The sums of whole rows, and 1 / l: no branch, as products are under way. Newton's step makes an approximation as
    // good as a division for these l, which are not near an end of fp32's range. Of a row that sees no key l is 0.
    __device__ void finalize() {
        bool none = false;
        each_row([&](int h) {
            l[h] = quad_sum(l[h]);
            const float near = reciprocal_approx(l[h]);
            reciprocal[h] = fmaf(near, -fmaf(l[h], near, -1.0f), near);
            none |= l[h] == 0.0f;
        });
        sees_none = __any_sync(0xffffffff, none);
    }

    // The log-sum-exp of the warp's rows before row `end`, in natural logarithms. No branch either.
    __device__ void store_lse_if(bool wanted, float *lse, int end) const {
        each_row([&](int h) {
            const int row = h * 8 + accumulator_row();
            const float value = origins.from_zero(h, m[h] + __log2f(l[h]), scale) * ln_2;
            store_global_4_if(wanted && lane_index() % 4 == 0 && row < end, lse + row, value);
        });
    }

    // O /= l; of a row that sees no key, O = 0, whatever is in V.
    template <int head_dim>
    __device__ void normalize(Accumulator<16, head_dim> &o) {
        if (sees_none)
            each_row([&](int h) {
                if (l[h] != 0.0f) return;
                reciprocal[h] = 0.0f;
                each_element(o, h, [&](float &x) { x = 0.0f; });
            });
        each_row([&](int h) { scale_row(o, h, reciprocal[h]); });
    }

    // Always true, which the compiler cannot know: what is told from l comes behind all of P, and what is told from 1 / l
    // behind `finalize`. (A NaN is not below 0.)
    __device__ bool is_summed() const { return !(l[0] + l[1] < 0.0f); }
    __device__ bool is_finalized() const {
        bool is = true;
        each_row([&](int h) { is &= !(l[h] < 0.0f && reciprocal[h] < 0.0f); });
        return is;
    }

  private:
    // A lane's sum of a row if each P is 1, and what rounding m may add to it.
    template <int cols>
    static constexpr float ones = cols / 4 * 1.001f;

    // Sets the origin and m of a row with this maximum.
    __device__ void begin(int h, float highest) { m[h] = fmaxf(origins.begin(h, highest, scale), -FLT_MAX); }

    // Turns S into P, and gives the block's own sums. P has three operands, and the operand cache keeps the last one of
    // each kind and bank: if one row's elements follow each other, m stays there, wherever ptxas has put it.
    template <int cols>
    __device__ void exponentiate(Accumulator<16, cols> &s, float (&sum)[2]) {
        origins.subtract_from(s);
        float most;  // of the sum of the row before
        each_row([&](int h) {
            // m stays what it is, as no sum is negative. The compiler cannot know that, so it waits for most of the row
            // before: not for all of it, or the exponentials would pause.
            if (h > 0) m[h] = fmaxf(m[h], fminf(most, -FLT_MAX));
            int seen = 0;
            sum[h] = 0.0f;
            each_element(s, h, [&](float &x) {
                x = exp2_approx(fmaf(x, scale, -m[h]));
                sum[h] += x;
                if (++seen == cols / 4 * 3 / 4) most = sum[h];
            });
        });
    }

    // Adds a block's sums to l, and keeps what rounding loses (Kahan, 1965).
    __device__ void add(const float (&sum)[2]) {
        each_row([&](int h) {
            const float added = sum[h] - rounding[h], total = l[h] + added;
            rounding[h] = total - l[h] - added;
            l[h] = total;
        });
    }

    // A sum that is NaN is above nothing: its row is lost, and must not move the others of its warp.
    __device__ bool any_above(float limit, const float (&sum)[2]) const {
        bool above = false;
        each_row([&](int h) { above |= sum[h] > limit; });
        return __any_sync(0xffffffff, above);
    }

    // The rare path: m was too low. P, or S where it is lost and computed once more, gives a higher one. A tile that has
    // lost scores looks for each block's maxima from then on.
    template <int cols, class Recompute>
    __device__ void correct(Accumulator<16, cols> &s, float (&sum)[2], Recompute recompute) {
        if (!any_above(lost, sum)) {
            scale_down(s, sum);
        } else {
            looks_for_maxima = true;
            recompute();
            raise_to_maxima(s);
            exponentiate(s, sum);
        }
    }

    // Raises m by the block's largest P of each row, and scales down what was computed with the old m.
    template <int cols>
    __device__ void scale_down(Accumulator<16, cols> &s, float (&sum)[2]) {
        raised = true;
        each_row([&](int h) {
            const float before = m[h];
            m[h] += fmaxf(__log2f(row_max(s, h)), 0.0f);
            follow(h, before, origins.of_row[h]);
            scale_row(s, h, factor[h]);
            sum[h] *= factor[h];
        });
    }

    // Raises m to the maxima once one has passed it by more than the slack.
    template <int cols>
    __device__ void raise_to_maxima(Accumulator<16, cols> &s) {
        float highest[2];
        bool passed = false;
        const auto in_log = [&](int h) { return (highest[h] - origins.of_row[h]) * scale; };
        each_row([&](int h) {
            highest[h] = row_max(s, h);
            passed |= in_log(h) - m[h] > slack;
        });
        raised = __any_sync(0xffffffff, passed);
        if (!raised) return;
        each_row([&](int h) {
            const float before = m[h], origin_before = origins.of_row[h];
            if (in_log(h) > m[h]) begin(h, highest[h]);
            follow(h, before, origin_before);
        });
        origins.look();
    }

    // Scales l of a row down to m; O is yet to follow.
    __device__ void follow(int h, float m_before, float origin_before) {
        factor[h] = exp2_approx(fmaf(origin_before - origins.of_row[h], scale, m_before - m[h]));
        l[h] *= factor[h];
        rounding[h] *= factor[h];
    }
};
