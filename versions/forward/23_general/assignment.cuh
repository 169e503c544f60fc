// Which rows of which head a CTA computes, and where these lie in global memory.
#pragma once
#include "params.cuh"
#include "schedule/l2_sections.cuh"
#include "tile/layout.cuh"

// One CTA computes block_m rows of one head's output, or as many as are left. Consecutive query heads share a head of K
// and V.
//
// Without a mask the grid's own order is as good as any other. With a causal mask later rows see more keys and take
// longer. CTAs then start with the longest block of every head and end with the shortest, so that all SMs end together.
// If K and V of all heads are larger than 32 MB of L2, the heads are taken in sections that fit, but of at least one head
// of K and V.
template <class T, int block_m, int head_dim, bool causal, class Params = AttentionParams>
struct Assignment {
    static constexpr unsigned l2_keys = (32u << 20) / (2 * head_dim * sizeof(T));  // rows of K and V in 32 MB

    const Params &params;
    int block, head, batch;

    __device__ explicit Assignment(const Params &params_, uint3 cta = blockIdx)
        : params(params_), block(cta.x), head(cta.y), batch(cta.z) {
        if (causal) reorder(cta);
    }

    __device__ int seqlen_q() const { return params.seqlen_q; }
    __device__ int seqlen_k() const { return params.seqlen_k; }
    __device__ int first_row() const { return block * block_m; }
    __device__ int rows() const { return min(block_m, params.seqlen_q - first_row()); }

    __device__ const T *q() const { return at<const T>(params.q, params.q_stride, head) + first_row() * params.q_stride.row; }
    __device__ const T *k() const { return at<const T>(params.k, params.k_stride, head_k()); }
    __device__ const T *v() const { return at<const T>(params.v, params.v_stride, head_k()); }
    __device__ T *o() const { return at<T>(params.o, params.o_stride, head) + first_row() * params.o_stride.row; }
    __device__ float *lse() const {
        return params.lse + (static_cast<long long>(batch) * params.num_heads + head) * params.seqlen_q + first_row();
    }

  protected:
    __device__ int head_k() const { return head / (params.num_heads / params.num_heads_k); }

  private:
    template <class Element, class Tensor>
    __device__ Element *at(Tensor *tensor, const TensorStride &stride, int head) const {
        return static_cast<Element *>(tensor) + (batch * stride.batch + head * stride.head);
    }

    // Renumbers the CTAs in the order in which they start.
    __device__ void reorder(uint3 cta) {
        const unsigned blocks = gridDim.x, heads = gridDim.y * gridDim.z;
        const unsigned group = params.num_heads / params.num_heads_k;
        const unsigned section = min(max(l2_keys / params.seqlen_k, 1u) * group, heads);
        unsigned any_head;
        longest_first(cta.x + blocks * (cta.y + gridDim.y * cta.z), blocks, heads, section, block, any_head);
        head = any_head % gridDim.y;
        batch = any_head / gridDim.y;
    }
};
