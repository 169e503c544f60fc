// What is known of each row of a tile of Q: a number of lse and one of delta. They travel with the tile.
#pragma once
#include "ptx/sm80.cuh"
#include "tile/fragment.cuh"

template <int rows>
struct RowNumbers {
    float lse[rows], delta[rows];

    // Starts copying them, 16 bytes a thread.
    __device__ void copy(const float *from_lse, const float *from_delta) {
        const int i = threadIdx.x * 4;
        if (i < rows)
            cp_async_16(shared_address(lse + i), from_lse + i);
        else if (i < 2 * rows)
            cp_async_16(shared_address(delta + i - rows), from_delta + i - rows);
    }
};

// Visits the elements of a transposed tile with the number of their row of Q, which is a column there.
template <int keys, int rows, class Visit>
__device__ inline void each_row_of_q(Accumulator<keys, rows> &s, const float *numbers, Visit visit) {
#pragma unroll
    for (int n = 0; n < rows / 8; ++n) {
        const float2 of_row = *reinterpret_cast<const float2 *>(numbers + n * 8 + accumulator_col());
#pragma unroll
        for (int m = 0; m < keys / 16; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) visit(s.block[m][n][i], i % 2 ? of_row.y : of_row.x);
    }
}
