// Keys of a sequence that are cut into parts.
#pragma once
#include "decode_params.cuh"
#include "ptx/sm80.cuh"
#include "softmax/log2.cuh"
#include "tile/layout.cuh"

// Where the parts of a sequence are among all: so many from the first one on, each so far behind the one before.
struct Parts {
    int first, apart, count;
};

struct SplitParams : SinkingParams {
    int num_splits;
    int num_parts, target_parts;  // of all sequences, where longer ones are cut into more
    FLASHLADDER_FURTHER_FIELDS(SinkingParams, num_splits, num_parts, target_parts)

    // Part `split` of a sequence is part split * batch + sequence of all.
    __device__ Parts parts_of(int sequence) const { return {sequence, batch, num_splits}; }

    // The first of `blocks` blocks of keys that part `split` has; the next part's is behind its last one. It depends on
    // the sequence's own length alone, whatever is in the batch.
    __device__ int first_block(int blocks, int split) const {
        return static_cast<int>(static_cast<long long>(blocks) * split / num_splits);
    }
};

// Sums and maxima over a warp, for all its lanes.
__device__ inline float warp_max(float x) {
#pragma unroll
    for (int lane = 1; lane < 32; lane *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, lane));
    return x;
}
template <class T>
__device__ inline T warp_sum(T x) {
#pragma unroll
    for (int lane = 1; lane < 32; lane *= 2) x += __shfl_xor_sync(0xffffffff, x, lane);
    return x;
}
