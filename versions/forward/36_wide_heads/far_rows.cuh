// A rarely rescaled softmax of a warp's 16 rows, whose scores may lie far from 0.
#pragma once
#include "33_rare_rescale/rare_rescale.cuh"

// 2^(unit * S - m) by one fused multiply-add is as wrong as m is rounded, which beyond 2^24 is a unit and more. So a row whose
// maximum is that far from 0 has it subtracted from S, which is exact near it. Between blocks `far` is in the place of its
// m, which any score passes: such rows take the branch that raises m, and others pay nothing.
struct FarRows : RarelyRescaled<16> {
    static constexpr float far = -0x1.fffffcp127f;
    float origin[2];  // that m counts from, unscaled; m is 0 there. Of other rows 0

    // Before a tile of which no row may see a key.
    __device__ void clear() {
        RarelyRescaled<16>::clear();
        origin[0] = origin[1] = 0.0f;
    }

    template <int cols>
    __device__ void start(Accumulator<16, cols> &s) {
        update(s);
        leave();
    }

    template <int cols>
    __device__ void update(Accumulator<16, cols> &s) {
        float sum[1][2];
        raise_to_maxima(s);
        exponentiate(s, sum[0]);
        if (any_above(raised ? INFINITY : ones<cols>, sum)) scale_down(s, sum);
        add(sum);
    }

    template <int head_dim>
    __device__ void rescale(Accumulator<16, head_dim> &o) {
        if (!raised) return;
        DeferredSoftmax<16>::rescale(o);
        leave();
    }

    __device__ void store_lse(float *lse, int end) {
        each_row([&](int b, int h) { m[b][h] = fmaf(origin[h], unit, m_of(h)); });
        RarelyRescaled<16>::store_lse(lse, end);
    }

  private:
    __device__ float m_of(int h) const { return m[0][h] == far ? 0.0f : m[0][h]; }

    // Far rows' m, until `update` needs it.
    __device__ void leave() {
        each_row([&](int b, int h) { m[b][h] = origin[h] != 0.0f ? far : m[b][h]; });
    }

    // Turns S into P, and gives the block's own sums. One FFMA an element, as ptxas would make of a product and a difference.
    template <int cols>
    __device__ void exponentiate(Accumulator<16, cols> &s, float (&sum)[2]) const {
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (int n = 0; n < cols / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float &x = s.block[0][n][i];
                x = exp2_approx(fmaf(x, unit, -m[0][i / 2]));
                sum[i / 2] += x;
            }
    }

    template <int cols>
    __device__ void raise_to_maxima(Accumulator<16, cols> &s) {
        float highest[2];
        bool passed = false;
        each_row([&](int b, int h) {
            highest[h] = quad_max(lane_max(s, b, h)) * unit;
            passed |= highest[h] - m[b][h] > slack;
        });
        raised = __any_sync(0xffffffff, passed);
        if (!raised) return;
        each_row([&](int b, int h) {
            const float m_before = m_of(h), before = origin[h];
            const float top = quad_max(lane_max(s, b, h));
            m[b][h] = m_before;
            if ((top - before) * unit > m_before) {
                const bool is_far = fabsf(highest[h]) >= 0x1p23f && fabsf(top) < INFINITY;
                origin[h] = is_far ? top : 0.0f;
                m[b][h] = is_far ? 0.0f : highest[h];
            }
            factor[b][h] = exp2_approx(fmaf(before - origin[h], unit, m_before - m[b][h]));
            l[b][h] *= factor[b][h];
            missed[b][h] *= factor[b][h];
            if (__any_sync(0xffffffff, origin[h] != 0.0f)) each_element<cols>(s, b, h, [&](float &x) { x -= origin[h]; });
        });
    }
};
