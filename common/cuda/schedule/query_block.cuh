// Which part of the problem a CTA computes, and where that part lies in global memory.
#pragma once
#include "params.cuh"
#include "tile/layout.cuh"

// One CTA computes block_m rows of one head's output.
template <class T, int block_m>
struct QueryBlock {
    const AttentionParams &params;
    const int first_row = blockIdx.x * block_m;
    const int head = blockIdx.y;
    const int batch = blockIdx.z;

    __device__ const T *q() const {
        return static_cast<const T *>(params.q) + start(params.q_stride) + first_row * params.q_stride.row;
    }
    __device__ const T *k() const { return static_cast<const T *>(params.k) + start(params.k_stride); }
    __device__ const T *v() const { return static_cast<const T *>(params.v) + start(params.v_stride); }
    __device__ T *o() const {
        return static_cast<T *>(params.o) + start(params.o_stride) + first_row * params.o_stride.row;
    }
    __device__ float *lse() const {
        return params.lse + (static_cast<long long>(batch) * params.num_heads + head) * params.seqlen_q + first_row;
    }

  private:
    __device__ long long start(const TensorStride &stride) const { return batch * stride.batch + head * stride.head; }
};
