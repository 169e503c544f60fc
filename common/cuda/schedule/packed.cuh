// Packed sequences: sequences of any lengths, one behind the other in tensors of one batch.
#pragma once
#include "params.cuh"

// As AttentionParams. Sequence b has the rows from cu_seqlens[b] up to cu_seqlens[b + 1] of total_q or total_k. seqlen_q and
// seqlen_k are the longest. lse is (heads, total_q).
struct PackedParams {
    const void *q, *k, *v;
    const int *cu_seqlens_q, *cu_seqlens_k;
    void *o;
    float *lse;
    TensorStride q_stride, k_stride, v_stride, o_stride;
    int batch, num_heads, num_heads_k, seqlen_q, seqlen_k, total_q, total_k;
    float softmax_scale;
    FLASHLADDER_FIELDS(q, k, v, cu_seqlens_q, cu_seqlens_k, o, lse, q_stride, k_stride, v_stride, o_stride, batch, num_heads,
                       num_heads_k, seqlen_q, seqlen_k, total_q, total_k, softmax_scale)
};

// Of `total` rows those of one sequence. Whatever cu_seqlens says, they are within the tensor.
struct Sequence {
    int begin, length;

    __device__ Sequence(int begin_, int end, int total)
        : begin(min(max(begin_, 0), total)), length(min(max(end, begin), total) - begin) {}
    // Volatile: read anew each time, so that nothing of it is kept in registers.
    __device__ Sequence(const volatile int *starts, int b, int total) : Sequence(starts[b], starts[b + 1], total) {}
};

// Of sequence b, of `batch` and one more: the rows behind the last one, which see no key.
__device__ inline Sequence rows_of(const PackedParams &params, int b) {
    return {__ldg(params.cu_seqlens_q + b), b < params.batch ? __ldg(params.cu_seqlens_q + b + 1) : params.total_q, params.total_q};
}
__device__ inline Sequence keys_of(const PackedParams &params, int b) {
    return {__ldg(params.cu_seqlens_k + b), __ldg(params.cu_seqlens_k + min(b + 1, params.batch)), params.total_k};
}
