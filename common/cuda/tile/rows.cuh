// The rows of a warp's 16-row accumulator. A lane holds parts of two of them: row h is row 8 * h + accumulator_row(). The
// four lanes of a quad share both.
#pragma once
#include "tile/gemm.cuh"

// Reductions over the lanes of a quad.
__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

template <class Row>
__device__ inline void each_row(Row row) {
#pragma unroll
    for (int h = 0; h < 2; ++h) row(h);
}

// Visits the lane's elements of one row.
template <int cols, class Element>
__device__ inline void each_element(Accumulator<16, cols> &c, int h, Element element) {
#pragma unroll
    for (int n = 0; n < cols / 8; ++n)
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; ++i) element(c.block[0][n][i]);
}

template <int cols>
__device__ inline void scale_row(Accumulator<16, cols> &c, int h, float factor) {
    each_element(c, h, [&](float &x) { x *= factor; });
}

template <int cols>
__device__ inline float row_max(Accumulator<16, cols> &c, int h) {
    float highest = -INFINITY;
    each_element(c, h, [&](float x) { highest = fmaxf(highest, x); });
    return quad_max(highest);
}

// An accumulator as the A operand of the next product: two neighbouring 16 x 8 blocks are one 16 x 16 operand block, lane
// by lane.
template <class T, int cols>
__device__ inline HeldA<16, cols> round_to_operand(const Accumulator<16, cols> &c) {
    HeldA<16, cols> a;
#pragma unroll
    for (int step = 0; step < cols / 16; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float(&block)[4] = c.block[0][step * 2 + i / 2];
            a.block[step][0][i] = pack<T>(block[i % 2 * 2], block[i % 2 * 2 + 1]);
        }
    return a;
}
