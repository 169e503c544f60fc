// The CTAs that have parts of the same rows.
#pragma once
#include "arrivals.cuh"
#include "partials.cuh"

struct Work {
    Partials partials;
    unsigned *arrived;  // CTAs, for each tile of rows
};
FLASHLADDER_COUNTERS(arrived, "batch * num_heads_k * cdiv(num_heads * seqlen_q, 16 * num_heads_k)");

// The tile of rows that this CTA has a part of.
__device__ inline int rows_index(int batch, int head_k, int num_heads_k) {
    return (batch * num_heads_k + head_k) * gridDim.x + blockIdx.x;
}
