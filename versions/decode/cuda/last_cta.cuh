// The CTAs that have parts of the same rows, and which of them is the last one to be done.
#pragma once
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

// Whether this CTA is the last of `ctas` to come here, for all its threads. What the others wrote before they came is then
// there to be read. The last one leaves the counter at zero.
__device__ inline bool is_last_of(int ctas, unsigned *arrived) {
    __shared__ bool is_last;
    __syncthreads();  // every thread has written its part
    if (threadIdx.x == 0) {
        __threadfence();  // before others learn that it is there
        is_last = atomicInc(arrived, ctas - 1) == ctas - 1;
        __threadfence();  // behind what the others say by their arrival
    }
    __syncthreads();
    return is_last;
}
