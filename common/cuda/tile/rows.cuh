// The rows of a warp's 16-row accumulator. A lane holds parts of two of them: row h is row 8 * h + accumulator_row(). The
// four lanes of a quad share both.
#pragma once
#include "tile/fragment.cuh"

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
