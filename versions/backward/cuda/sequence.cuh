// The sequence that a CTA works on: one of a batch of one length, or one of packed sequences of any lengths. What is known of
// rows of Q is padded to whole tiles.
#pragma once
#include "prepare_tile.cuh"
#include "schedule/packed.cuh"

using config::block_m;

// The argument of kernels for packed sequences. Sequence b has the rows from cu_seqlens[b] up to cu_seqlens[b + 1] of
// total_q or total_k. seqlen_q and seqlen_k are the longest. lse is (heads, total_q).
struct PackedBackwardParams : BackwardParams {
    const int *cu_seqlens_q, *cu_seqlens_k;
    int total_q, total_k;
    FLASHLADDER_FURTHER_FIELDS(BackwardParams, cu_seqlens_q, cu_seqlens_k, total_q, total_k)
};

// The parameters of a kernel for which lse has a gradient, which lies as lse does.
template <class Params>
struct WithLseGradient : Params {
    const float *dlse;
    FLASHLADDER_FURTHER_FIELDS(Params, dlse)
};

// The parameters of a kernel that gives the gradients of sinks: (num_heads) fp32, and what each row adds, which lies as lse does.
template <class Params>
struct WithSinkGradient : Params {
    const float *sinks;
    float *dsinks;
    FLASHLADDER_FURTHER_FIELDS(Params, sinks, dsinks)
};

template <class Params, bool packed>
struct BackwardSequence {
    static constexpr bool has_dsinks = config::dsinks;
    const Params &p;
    int batch, seqlen_q, seqlen_k;
    int first_q, first_k;  // its first row and key among those of all

    __device__ BackwardSequence(const Params &p_, int batch_) : p(p_), batch(batch_) {
        if constexpr (packed) {
            const Sequence q(p.cu_seqlens_q, batch, p.total_q), k(p.cu_seqlens_k, batch, p.total_k);
            first_q = q.begin, seqlen_q = q.length;
            first_k = k.begin, seqlen_k = k.length;
        } else {
            seqlen_q = p.seqlen_q, seqlen_k = p.seqlen_k;
            first_q = batch * seqlen_q, first_k = batch * seqlen_k;
        }
    }

    __device__ int rows() const { return seqlen_q; }
    // Of all sequences.
    __device__ int total_q() const {
        if constexpr (packed) return p.total_q;
        return p.batch * seqlen_q;
    }
    __device__ int total_k() const {
        if constexpr (packed) return p.total_k;
        return p.batch * seqlen_k;
    }
    // A head of a tensor like Q, or like K.
    template <class T>
    __device__ T *like_q(T *tensor, const TensorStride &stride, int head) const {
        return at(tensor, stride, head, first_q);
    }
    template <class T>
    __device__ T *like_k(T *tensor, const TensorStride &stride, int head) const {
        return at(tensor, stride, head, first_k);
    }
    // Of a tensor like lse.
    template <class T>
    __device__ T *like_lse(T *numbers, int head) const {
        if constexpr (packed) return numbers + static_cast<long long>(head) * p.total_q + first_q;
        return numbers + (static_cast<long long>(batch) * p.num_heads + head) * seqlen_q;
    }
    // The gradient of a head's lse, or null where it has none.
    __device__ const float *dlse(int head) const {
        if constexpr (config::dlse) return like_lse(p.dlse, head);
        return nullptr;
    }
    // What a row adds to the gradient of its head's sink, which has the share exp(sink - lse) of the row's weights. The part of
    // `delta` that is rowsum(dO O) is 0 in a row without keys. A row of lse = -inf adds 0.
    __device__ void pull_sink(int head, int row, float lse, float delta) const {
        if constexpr (has_dsinks)
            like_lse(p.dsinks, head)[row] = lse == -INFINITY ? 0.0f : -delta * exp2_approx((p.sinks[head] - lse) * log2_e);
    }
    // The first row of a tile among the padded rows of all heads. The tiles of a sequence are counted from its first row's place
    // among whole tiles of all, and one more for each sequence before it: total_q // block_m + batch a head.
    __device__ long long padded_row(int head, int tile) const {
        const int first = first_q / block_m + batch;
        return (static_cast<long long>(head) * (total_q() / block_m + p.batch) + first + tile) * block_m;
    }
    // Of tiles of keys, likewise: how many places a head has, and which one is a tile's among those of all heads.
    __device__ long long key_places() const { return total_k() / config::block_n + p.batch; }
    __device__ long long key_place(int head_k, int tile) const {
        return head_k * key_places() + first_k / config::block_n + batch + tile;
    }

  private:
    template <class T>
    __device__ T *at(T *tensor, const TensorStride &stride, int head, int first) const {
        return packed ? tensor + (head * stride.head + first * stride.row) : head_of(tensor, stride, batch, head);
    }
};
