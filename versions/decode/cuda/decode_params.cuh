// What the host passes to every kernel of the ladder, and what follows from it.
#pragma once
#include "config.cuh"
#include "launch.cuh"
#include "softmax/sinks.cuh"

#include <type_traits>

// Tensors are (batch, seqlen, heads, head_dim), their last dimension contiguous. A sequence's keys are the first
// cache_seqlens[batch] of its seqlen_k places in the caches. lse is (batch, heads, seqlen_q) fp32, contiguous, or null.
struct DecodeParams {
    const void *q;
    const void *k_cache;
    const void *v_cache;
    void *o;
    float *lse;
    const int *cache_seqlens;
    TensorStride q_stride;
    TensorStride k_cache_stride;
    TensorStride v_cache_stride;
    TensorStride o_stride;
    int batch;
    int num_heads;
    int num_heads_k;
    int seqlen_q;
    int seqlen_k;
    float softmax_scale;
    FLASHLADDER_FIELDS(q, k_cache, v_cache, o, lse, cache_seqlens, q_stride, k_cache_stride, v_cache_stride, o_stride,
                       batch, num_heads, num_heads_k, seqlen_q, seqlen_k, softmax_scale)

    // Keys of a sequence; no more than there is room for, whatever the tensor says.
    __device__ int keys_of(int sequence) const { return max(0, min(cache_seqlens[sequence], seqlen_k)); }

    // Heads of Q that share one of K and V.
    __device__ int group() const { return num_heads / num_heads_k; }

    // The place of a row in lse.
    __device__ long long row_index(int sequence, int head, int row) const {
        return (static_cast<long long>(sequence) * num_heads + head) * seqlen_q + row;
    }
};

// What a rung has no field for is not there: config::sinks is its own, or that here.
namespace absent {
constexpr bool sinks = false, fp8_cache = false, tensor_scales = false, page_scales = false, tree = false;
}
namespace config {
using namespace absent;
}
using SinkingParams = std::conditional_t<config::sinks, Sinking<DecodeParams>, DecodeParams>;

// That of a head, where there are any.
template <class Params>
__device__ inline Sink<config::sinks> sink_of(const Params &params, int head) {
    Sink<config::sinks> sink;
    sink.take(params, head);
    return sink;
}

// How many of the keys a row sees: all, or, under the causal rule, one less for each row behind it.
template <bool causal>
__device__ inline int keys_seen(int keys, int row, int seqlen_q) {
    return causal ? min(keys, max(0, keys - seqlen_q + 1 + row)) : keys;
}

// A row's log-sum-exp; or, where it sees no key, what its ladder writes for that.
__device__ inline float or_of_no_key(float lse, float of_no_key) { return lse == -INFINITY ? of_no_key : lse; }
