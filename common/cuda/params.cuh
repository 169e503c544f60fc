// What the host passes to every kernel, and what every kernel tells the host.
#pragma once

// The first kernel argument. common/runtime/launch.py mirrors it with ctypes, and checks its size against the declared one.
// Tensors are (batch, seqlen, heads, head_dim), their last dimension contiguous; lse is (batch, heads, seqlen_q) fp32,
// contiguous, or null. Strides are in elements.
struct TensorStride {
    long long batch;
    long long row;
    long long head;
};

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
};

// Declares what the host must know to launch the kernel. The build reads it from the PTX, so the kernel alone says it.
// The grid is (ceil(seqlen_q / block_m), num_heads, batch). launch.cuh has whatever else a kernel may declare.
#define FLASHLADDER_LAUNCH(num_threads, shared_bytes, block_m, block_n)                                              \
    extern "C" __constant__ const unsigned launch_attention_forward[] = {num_threads, shared_bytes, block_m,         \
                                                                         block_n, sizeof(AttentionParams)}
