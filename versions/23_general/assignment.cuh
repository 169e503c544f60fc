// Which rows of which head a CTA computes, and where these lie in global memory.
#pragma once
#include "params.cuh"
#include "tile/layout.cuh"

// One CTA computes block_m rows of one head's output, or as many as are left. Consecutive query heads share a head of K
// and V.
//
// Without a mask the grid's own order is as good as any other. With a causal mask later rows see more keys and take
// longer. CTAs then start with the longest block of every head and end with the shortest, so that all SMs end together.
// If K and V of all heads are larger than `l2_share`, the heads are taken in sections that fit, but of at least one
// head of K and V.
template <class T, int block_m, int head_dim, bool causal, class Params = AttentionParams>
struct Assignment {
    static constexpr unsigned l2_share = 32 << 20;                        // bytes
    static constexpr unsigned l2_keys = l2_share / (2 * head_dim * sizeof(T));  // rows of K and V that fit into it

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

    __device__ const T *q() const {
        return static_cast<const T *>(params.q) + start(params.q_stride, head) + first_row() * params.q_stride.row;
    }
    __device__ const T *k() const { return static_cast<const T *>(params.k) + start(params.k_stride, head_k()); }
    __device__ const T *v() const { return static_cast<const T *>(params.v) + start(params.v_stride, head_k()); }
    __device__ T *o() const {
        return static_cast<T *>(params.o) + start(params.o_stride, head) + first_row() * params.o_stride.row;
    }
    __device__ float *lse() const {
        return params.lse + (static_cast<long long>(batch) * params.num_heads + head) * params.seqlen_q + first_row();
    }

  protected:
    __device__ int head_k() const { return head / (params.num_heads / params.num_heads_k); }

  private:
    __device__ long long start(const TensorStride &stride, int head) const {
        return batch * stride.batch + head * stride.head;
    }

    // Renumbers the CTAs in the order in which they start.
    __device__ void reorder(uint3 cta) {
        const unsigned blocks = gridDim.x, heads = gridDim.y * gridDim.z;
        const unsigned group = params.num_heads / params.num_heads_k;
        const unsigned section = min(max(l2_keys / params.seqlen_k, 1u) * group, heads);
        const unsigned index = cta.x + blocks * (cta.y + gridDim.y * cta.z);
        const unsigned first = index / (section * blocks) * section;  // head of this section
        const unsigned within = index - first * blocks, count = min(section, heads - first);
        const unsigned turn = within / count, any_head = first + within % count;
        block = blocks - 1 - turn;
        head = any_head % gridDim.y;
        batch = any_head / gridDim.y;
    }
};
