// The argument of every rung of the ladder.
#pragma once
#include "config.cuh"
#include "launch.cuh"

// Tensors are (batch, seqlen, heads, head_dim), their last dimension contiguous; lse is (batch, heads, seqlen_q) fp32.
struct BackwardParams {
    const config::dtype *q, *k, *v, *o, *dout;
    const float *lse;
    config::dtype *dq, *dk, *dv;
    TensorStride q_stride, k_stride, v_stride, o_stride, dout_stride, dq_stride, dk_stride, dv_stride;
    int batch, num_heads, num_heads_k, seqlen_q, seqlen_k;
    float softmax_scale;
    FLASHLADDER_FIELDS(q, k, v, o, dout, lse, dq, dk, dv, q_stride, k_stride, v_stride, o_stride, dout_stride, dq_stride,
                       dk_stride, dv_stride, batch, num_heads, num_heads_k, seqlen_q, seqlen_k, softmax_scale)
};

template <class T>
__device__ inline T *head_of(T *tensor, const TensorStride &stride, int batch, int head) {
    return tensor + batch * stride.batch + head * stride.head;
}
