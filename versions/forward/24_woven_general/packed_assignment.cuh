// Packed sequences: which rows of which sequence a CTA computes, and where these lie in global memory.
#pragma once
#include "23_general/assignment.cuh"
#include "schedule/packed.cuh"

// As Assignment. The grid has as many CTAs for each sequence as the longest one needs; those behind the end of theirs
// have no rows. CTAs start with the last blocks of rows, so with those of long sequences, and under a causal mask with
// those that see the most keys.
template <class T, int block_m, int head_dim>
struct PackedAssignment : Assignment<T, block_m, head_dim, true, PackedParams> {
    Sequence q_rows, k_rows;

    __device__ PackedAssignment(const PackedParams &params_, uint3 cta)
        : Assignment<T, block_m, head_dim, true, PackedParams>(params_, cta),
          q_rows(params_.cu_seqlens_q, this->batch, params_.total_q),
          k_rows(params_.cu_seqlens_k, this->batch, params_.total_k) {}

    __device__ int seqlen_q() const { return q_rows.length; }
    __device__ int seqlen_k() const { return k_rows.length; }
    __device__ int rows() const { return min(block_m, seqlen_q() - this->first_row()); }

    __device__ const T *q() const { return at<const T>(this->params.q, this->params.q_stride, this->head, row_of_all()); }
    __device__ const T *k() const { return at<const T>(this->params.k, this->params.k_stride, this->head_k(), k_rows.begin); }
    __device__ const T *v() const { return at<const T>(this->params.v, this->params.v_stride, this->head_k(), k_rows.begin); }
    __device__ T *o() const { return at<T>(this->params.o, this->params.o_stride, this->head, row_of_all()); }
    __device__ float *lse() const {
        return this->params.lse + static_cast<long long>(this->head) * this->params.total_q + row_of_all();
    }

  private:
    __device__ int row_of_all() const { return q_rows.begin + this->first_row(); }
    template <class Element, class Tensor>
    __device__ static Element *at(Tensor *tensor, const TensorStride &stride, int head, int row) {
        return static_cast<Element *>(tensor) + (head * stride.head + row * stride.row);
    }
};
