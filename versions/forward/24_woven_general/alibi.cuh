// ALiBi: a score loses a slope for each key between its own and that of its row (Press et al., arXiv:2108.12409).
#pragma once
#include "launch.cuh"
#include "softmax/online.cuh"

// The parameters of a kernel that has it. The slopes are (batch, num_heads) fp32, contiguous.
template <class Params>
struct Biased : Params {
    const float *alibi_slopes;
    FLASHLADDER_FURTHER_FIELDS(Params, alibi_slopes)
};

// What it adds to the scores of a warp's rows.
template <bool alibi>
struct Bias {
    float slope;  // in what an element of S counts
    int own;      // the key of the first row

    // For the rows from `warp_row` on in a CTA's work, which assigned() finds. An element of S counts `unit` in log2.
    template <class Params, class Assigned, class Mask>
    __device__ Bias(const Params &params, Assigned assigned, const Mask &mask, int warp_row, float unit) {
        if constexpr (alibi) {
            const auto work = assigned();
            slope = params.alibi_slopes[work.batch * params.num_heads + work.head] * log2_e / unit;
            own = work.first_row() + warp_row + mask.shift - 1;
        }
    }
    // S holds the scores of all its rows and the keys from `first_key` on.
    template <int rows, int cols>
    __device__ void add(Accumulator<rows, cols> &s, int first_key) const {
        if constexpr (alibi)
#pragma unroll
            for (int b = 0; b < rows / 16; ++b)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int row = own + b * 16 + h * 8 + accumulator_row();
                    const float ahead = row - first_key - accumulator_col();  // keys from the lane's first one to it
#pragma unroll
                    for (int n = 0; n < cols / 8; ++n)
#pragma unroll
                        for (int i = 0; i < 2; ++i) s.block[b][n][2 * h + i] -= slope * fabsf(ahead - (n * 8 + i));
                }
    }
};
