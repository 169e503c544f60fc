// What a mask has of each column of a fragment alone (common/expression/terms.py): of a key, or where keys are its rows, of a row.
#pragma once
#include "tile/fragment.cuh"

// `Terms` of so many columns. A warp evaluates them, a column a lane; lanes without a column evaluate nothing.
template <class Terms, int cols>
struct ColumnTerms {
    Terms of_lane[(cols + 31) / 32];

    // `evaluate` gives those of a column.
    template <class Evaluate>
    __device__ explicit ColumnTerms(Evaluate evaluate) {
#pragma unroll
        for (int col = 0; col < cols; col += 32)
            of_lane[col / 32] = cols - col >= 32 || col + lane_index() < cols ? evaluate(col + lane_index()) : Terms{};
    }
    // Those of a thread's column n * 8 + accumulator_col() + i. A whole warp asks.
    __device__ Terms at(int n, int i) const { return of_lane[n / 4].from(n % 4 * 8 + accumulator_col() + i); }
};
