// S^T and dP^T of a warp, element by element.
#pragma once
#include "tile/fragment.cuh"

// Visits a score and the gradient beside it with lse and delta of their row of Q, which is a column here.
template <int keys, int rows, class Visit>
__device__ inline void each_score(Accumulator<keys, rows> &s, Accumulator<keys, rows> &dp, const float *lse,
                                  const float *delta, Visit visit) {
#pragma unroll
    for (int n = 0; n < rows / 8; ++n) {
        const float2 l = *reinterpret_cast<const float2 *>(lse + n * 8 + accumulator_col());
        const float2 d = *reinterpret_cast<const float2 *>(delta + n * 8 + accumulator_col());
#pragma unroll
        for (int m = 0; m < keys / 16; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                visit(s.block[m][n][i], dp.block[m][n][i], i % 2 ? l.y : l.x, i % 2 ? d.y : d.x);
    }
}
