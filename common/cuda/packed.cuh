// Packed sequences: which rows of which sequence a CTA computes, and where these lie in global memory.
#pragma once
#include "schedule.cuh"

// As AttentionParams. Sequences lie one behind the other in tensors of one batch: sequence b has the rows from
// cu_seqlens[b] up to cu_seqlens[b + 1] of total_q or total_k. seqlen_q and seqlen_k are the longest. lse is (heads, total_q).
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

    __device__ const T *q() const {
        return static_cast<const T *>(this->params.q) + start(this->params.q_stride, this->head, row_of_all());
    }
    __device__ const T *k() const {
        return static_cast<const T *>(this->params.k) + start(this->params.k_stride, this->head_k(), k_rows.begin);
    }
    __device__ const T *v() const {
        return static_cast<const T *>(this->params.v) + start(this->params.v_stride, this->head_k(), k_rows.begin);
    }
    __device__ T *o() const {
        return static_cast<T *>(this->params.o) + start(this->params.o_stride, this->head, row_of_all());
    }
    __device__ float *lse() const {
        return this->params.lse + static_cast<long long>(this->head) * this->params.total_q + row_of_all();
    }

  private:
    __device__ int row_of_all() const { return q_rows.begin + this->first_row(); }
    __device__ static long long start(const TensorStride &stride, int head, int row) {
        return head * stride.head + row * stride.row;
    }
};
