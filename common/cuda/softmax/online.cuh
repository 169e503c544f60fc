// Online softmax over the rows of one warp (Milakov and Gimelshein, 2018), as FlashAttention uses it.
#pragma once
#include "softmax/log2.cuh"
#include "tile/fragment.cuh"

// C *= factor.
template <int rows, int cols>
__device__ inline void scale(Accumulator<rows, cols> &c, float factor) {
#pragma unroll
    for (int m = 0; m < rows / 16; ++m)
#pragma unroll
        for (int n = 0; n < cols / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) c.block[m][n][i] *= factor;
}

// The running maximum m and sum l of a warp's rows. A lane holds two rows of every 16 (see accumulator_row): row (b, h)
// is row 16 * b + 8 * h + accumulator_row(). Of l it holds its own share, which `finish` adds to the other three lanes'.
// Scores are worth `unit` in log2 each, and m is kept in log2.
template <int rows>
struct OnlineSoftmax {
    float unit;
    float m[rows / 16][2];
    float l[rows / 16][2];

    __device__ void clear() {
        each_row([&](int b, int h) {
            m[b][h] = -INFINITY;
            l[b][h] = 0.0f;
        });
    }

    // Takes the next block of scores S: raises m to its row maxima, brings l and O down to the new m, and turns S into
    // P = 2^(unit * S - m), one FFMA and one exponential an element.
    template <int cols, int head_dim>
    __device__ void update(Accumulator<rows, cols> &s, Accumulator<rows, head_dim> &o) {
        each_row([&](int b, int h) {
            raise(fmaxf(m[b][h], quad_max(lane_max(s, b, h)) * unit), o, b, h);
        });
        exponentiate(s, l);
    }

    // The first block of scores: nothing was summed before, so there is nothing to bring down.
    template <int cols>
    __device__ void start(Accumulator<rows, cols> &s) {
        each_row([&](int b, int h) {
            m[b][h] = quad_max(lane_max(s, b, h)) * unit;
            l[b][h] = 0.0f;
        });
        exponentiate(s, l);
    }

    // O /= l.
    template <int head_dim>
    __device__ void finish(Accumulator<rows, head_dim> &o) {
        each_row([&](int b, int h) {
            l[b][h] = quad_sum(l[b][h]);
            each_element<head_dim>(o, b, h, [&](float &x) { x = __fdividef(x, l[b][h]); });
        });
    }

    // The same with one reciprocal a row.
    template <int head_dim>
    __device__ void finish_by_reciprocal(Accumulator<rows, head_dim> &o) {
        each_row([&](int b, int h) {
            l[b][h] = quad_sum(l[b][h]);
            scale_row(o, b, h, 1.0f / l[b][h]);
        });
    }

    // Writes the log-sum-exp of the warp's rows before row `end`, in natural logarithms.
    __device__ void store_lse(float *lse, int end = rows) const {
        if (lane_index() % 4 != 0) return;
        each_row([&](int b, int h) {
            const int row = b * 16 + h * 8 + accumulator_row();
            if (row < end) lse[row] = (m[b][h] + __log2f(l[b][h])) * ln_2;
        });
    }

  protected:
    template <class Row>
    __device__ static void each_row(Row row) {
#pragma unroll
        for (int b = 0; b < rows / 16; ++b)
#pragma unroll
            for (int h = 0; h < 2; ++h) row(b, h);
    }

    // Visits the lane's elements of one row.
    template <int cols, class C, class Element>
    __device__ static void each_element(C &c, int b, int h, Element element) {
#pragma unroll
        for (int n = 0; n < cols / 8; ++n)
#pragma unroll
            for (int i = 2 * h; i < 2 * h + 2; ++i) element(c.block[b][n][i]);
    }

    template <int cols>
    __device__ static float lane_max(const Accumulator<rows, cols> &s, int b, int h) {
        float highest = -INFINITY;
        each_element<cols>(s, b, h, [&](float x) { highest = fmaxf(highest, x); });
        return highest;
    }

    template <int cols>
    __device__ static void scale_row(Accumulator<rows, cols> &c, int b, int h, float factor) {
        each_element<cols>(c, b, h, [&](float &x) { x *= factor; });
    }

    // Sets m of one row to `highest`, and brings l down to it. Returns the factor by which O is yet to be brought down.
    __device__ float raise(float highest, int b, int h) {
        const float factor = exp2_approx(m[b][h] - highest);
        m[b][h] = highest;
        l[b][h] *= factor;
        return factor;
    }
    template <int head_dim>
    __device__ void raise(float highest, Accumulator<rows, head_dim> &o, int b, int h) {
        scale_row(o, b, h, raise(highest, b, h));
    }

    // Turns S into P, and adds a lane's P to `sum`. Column by column, the order in which P V will want its operands.
    template <int cols>
    __device__ void exponentiate(Accumulator<rows, cols> &s, float (&sum)[rows / 16][2]) const {
#pragma unroll
        for (int n = 0; n < cols / 8; ++n)
#pragma unroll
            for (int b = 0; b < rows / 16; ++b)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    s.block[b][n][i] = exp2_approx(s.block[b][n][i] * unit - m[b][i / 2]);
                    sum[b][i / 2] += s.block[b][n][i];
                }
    }
};
