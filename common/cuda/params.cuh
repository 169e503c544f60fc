// What the host passes to every kernel.
#pragma once
#include "launch.cuh"

// The first kernel argument. Tensors are (batch, seqlen, heads, head_dim), their last dimension contiguous; lse is (batch,
// heads, seqlen_q) fp32, contiguous, or null.
struct AttentionParams {
    const void *q;
    const void *k;
    const void *v;
    void *o;
    float *lse;
    TensorStride q_stride;
    TensorStride k_stride;
    TensorStride v_stride;
    TensorStride o_stride;
    int batch;
    int num_heads;
    int num_heads_k;
    int seqlen_q;
    int seqlen_k;
    float softmax_scale;
    FLASHLADDER_FIELDS(q, k, v, o, lse, q_stride, k_stride, v_stride, o_stride, batch, num_heads, num_heads_k, seqlen_q,
                       seqlen_k, softmax_scale)
};

// Declares what the host must know to launch the kernel. The build reads it from the PTX, so the kernel alone says it.
// The grid is (ceil(seqlen_q / block_m), num_heads, batch). launch.cuh has whatever else a kernel may declare.
#define FLASHLADDER_LAUNCH(num_threads, shared_bytes, block_m, block_n) \
    FLASHLADDER_KERNEL(attention_forward, AttentionParams, Launch{num_threads, shared_bytes, block_m, block_n})
