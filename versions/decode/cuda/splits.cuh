// Keys of a sequence that are cut into parts: what each part comes to, and how these are combined.
#pragma once
#include "config.cuh"
#include "decode_params.cuh"
#include "softmax/log2.cuh"

struct SplitParams : DecodeParams {
    int num_splits;
    FLASHLADDER_FURTHER_FIELDS(DecodeParams, num_splits)

    // The first of `blocks` blocks of keys that part `split` has; the next part's is behind its last one. It depends on
    // the sequence's own length alone, whatever is in the batch.
    __device__ int first_block(int blocks, int split) const {
        return static_cast<int>(static_cast<long long>(blocks) * split / num_splits);
    }
};

// O of each part, as if there were no other keys, and its log-sum-exp: fp32, part by part.
struct Partials {
    float *o;
    float *lse;
};
FLASHLADDER_WORKSPACE(partial_o, float, "num_splits * batch * num_heads * seqlen_q * head_dim");
FLASHLADDER_WORKSPACE(partial_lse, float, "num_splits * batch * num_heads * seqlen_q");

// O of a row from its parts, in their order: a thread a column. The parts are weighted by their log-sum-exp; one without
// keys has -inf, and no O.
__device__ inline void combine_parts(const SplitParams &params, Partials partials, int batch, int head, int row) {
    const long long at = params.row_index(batch, head, row), apart = params.row_index(params.batch, 0, 0);
    const float *lse = partials.lse + at, *o = partials.o + at * config::head_dim + threadIdx.x;

    float highest = -3.0e38f, sum = 0.0f, column = 0.0f;
#pragma unroll 8
    for (int split = 0; split < params.num_splits; ++split) highest = fmaxf(highest, lse[split * apart]);
#pragma unroll 8
    for (int split = 0; split < params.num_splits; ++split) {
        const float weight = exp2f((lse[split * apart] - highest) * log2_e);
        sum += weight;
        if (weight > 0.0f) column += weight * o[split * apart * config::head_dim];
    }
    static_cast<config::dtype *>(params.o)[batch * params.o_stride.batch + row * params.o_stride.row +
                                           head * params.o_stride.head + threadIdx.x] =
        static_cast<config::dtype>(sum > 0.0f ? column / sum : 0.0f);
    if (params.lse != nullptr && threadIdx.x == 0) params.lse[at] = highest + log2f(sum) * ln_2;
}
