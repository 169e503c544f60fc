// What both rungs begin with.
#pragma once
#include "config.cuh"
#include "launch.cuh"
#include "params.cuh"

struct RowDotsParams {
    const config::dtype *left, *right;
    float *dots;
    TensorStride left_stride, right_stride;
    int batch, num_heads, num_heads_k, seqlen_q, seqlen_k, segment;
    float softmax_scale;
    FLASHLADDER_FIELDS(left, right, dots, left_stride, right_stride, batch, num_heads, num_heads_k, seqlen_q, seqlen_k, segment,
                       softmax_scale)
};

__device__ inline float dot(const RowDotsParams &p, int batch, int head, int row, int begin, int end) {
    const TensorStride l = p.left_stride, r = p.right_stride;
    const config::dtype *left = p.left + batch * l.batch + head * l.head + row * l.row;
    const config::dtype *right = p.right + batch * r.batch + head * r.head + row * r.row;
    float sum = 0;
#pragma unroll config::chunk
    for (int i = begin; i < end; ++i) sum += static_cast<float>(left[i]) * static_cast<float>(right[i]);
    return sum;
}
