// New keys are written where a table of slots says, one CTA each: no length, no sequence and no row of Q. Engines write the
// keys of all tokens of a step so, before they call attention.
#include "config.cuh"
#include "decode/cuda/fp8_scales.cuh"
#include "decode/cuda/written_keys.cuh"

using namespace config;

constexpr int num_threads = 128;

// k_new and v_new are (batch, 1, num_heads_k, head_dim): a token each. Slot i is row i % page_size of page i / page_size; one
// that is none is not written.
struct SlotParams {
    const void *k_new, *v_new;
    const void *k_cache, *v_cache;
    const long long *slot_mapping;
    TensorStride k_new_stride, v_new_stride, k_cache_stride, v_cache_stride;
    int num_heads_k, page_size, num_pages;
    FLASHLADDER_FIELDS(k_new, v_new, k_cache, v_cache, slot_mapping, k_new_stride, v_new_stride, k_cache_stride,
                       v_cache_stride, num_heads_k, page_size, num_pages)
};

// A token's position, by which its key turns.
template <class Params>
struct Placed : Rotary<Params> {
    const long long *positions;
    FLASHLADDER_FURTHER_FIELDS(Rotary<Params>, positions)
};

using TurnedParams = std::conditional_t<rotary, Placed<SlotParams>, SlotParams>;

// Scales of heads are those of all tokens.
template <class Params>
struct SharedScales : Scaled<Params> {
    __device__ int scale_at(int, int page, int head) const { return Scaled<Params>::scale_at(0, page, head); }
};
using AppendParams = std::conditional_t<config::fp8_cache, SharedScales<TurnedParams>, TurnedParams>;

template <class Params>
__device__ inline int position_of(const Params &params, int token) {
    if constexpr (rotary) return static_cast<int>(max(0ll, min(params.positions[token], 0x7fffffffll)));
    return 0;
}

template <class T>
using Cached = std::conditional_t<config::fp8_cache, Quantised<T>, Kept<T>>;

FLASHLADDER_KERNEL(attention_append, AppendParams, Launch{num_threads, 0, 1, 1}.over("batch", "1", "1"));

extern "C" __global__ void __launch_bounds__(num_threads) attention_append(const __grid_constant__ AppendParams params) {
    const int token = blockIdx.x;
    const long long slot = params.slot_mapping[token];
    if (slot < 0 || slot >= static_cast<long long>(params.num_pages) * params.page_size) return;
    const KeyPlace place{static_cast<int>(slot / params.page_size), static_cast<int>(slot % params.page_size)};
    write_key<dtype, Cached>(params, place, token, 0, position_of(params, token));
}
