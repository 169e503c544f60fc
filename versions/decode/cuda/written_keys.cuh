// A key and its value on their way to a cache, and rotary embeddings (Su et al., arXiv:2104.09864).
#pragma once
#include "pages.cuh"

// Tables (rotary_positions, rotary_dim / 2), of one row for each place in a cache at least. The first rotary_dim columns
// turn.
template <class Params>
struct Rotary : Params {
    const void *rotary_cos, *rotary_sin;
    int rotary_dim, rotary_positions;
    FLASHLADDER_FURTHER_FIELDS(Params, rotary_cos, rotary_sin, rotary_dim, rotary_positions)
};

// Two columns of a row, which may turn together.
struct ColumnPair {
    int a, b;

    // Pair i of head_dim / 2; the first `turning` ones turn.
    __device__ ColumnPair(int i, int turning) : a(2 * i), b(2 * i + 1) {
        if (!config::rotary_interleaved && i < turning) a = i, b = i + turning;
    }
    template <class To, class T, class Cached>
    __device__ void copy(To *to, const T *from, Cached cached) const {
        to[a] = cached(from[a]), to[b] = cached(from[b]);
    }
};

// What a cache has of a number: itself.
template <class T>
struct Kept {
    using Element = T;

    template <class Params>
    __device__ Kept(const Params &, int, int, int) {}
    __device__ T k(T x) const { return x; }
    __device__ T v(T x) const { return x; }
};

// Turns pair i of a row, whose elements are a and b, by the angle of a position, or of the last one that has an angle. In
// fp32, without fma: rounded once, to the bits that torch's operators give.
template <class T, class Params>
__device__ inline void turn(T &a, T &b, const Params &params, int position, int i) {
    const long long at = min(position, params.rotary_positions - 1) * static_cast<long long>(params.rotary_dim / 2) + i;
    const float cos = static_cast<const T *>(params.rotary_cos)[at], sin = static_cast<const T *>(params.rotary_sin)[at];
    const float a_ = a, b_ = b;
    a = static_cast<T>(__fsub_rn(__fmul_rn(a_, cos), __fmul_rn(b_, sin)));
    b = static_cast<T>(__fadd_rn(__fmul_rn(a_, sin), __fmul_rn(b_, cos)));
}

// Writes row `row` of a sequence of k_new and v_new to a place of the caches, in all heads, by the whole CTA, as `Cached` has
// numbers. K is turned by its position.
template <class T, template <class> class Cached = Kept, class Params>
__device__ inline void write_key(const Params &params, KeyPlace place, int sequence, int row, int position) {
    using Element = typename Cached<T>::Element;
    constexpr int pairs = config::head_dim / 2;
    const auto from = [&](const void *tensor, TensorStride stride, int head) {
        return static_cast<const T *>(tensor) + sequence * stride.batch + row * stride.row + head * stride.head;
    };
    const auto to = [&](const void *cache, TensorStride stride, int head) {
        return const_cast<Element *>(static_cast<const Element *>(cache)) + place.page * stride.batch + place.row * stride.row +
               head * stride.head;
    };
    int turning = 0;
    if constexpr (config::rotary) turning = params.rotary_dim / 2;
    for (int n = threadIdx.x; n < params.num_heads_k * pairs; n += blockDim.x) {
        const int head = n / pairs, i = n % pairs;
        const ColumnPair pair{i, turning};
        const Cached<T> cached{params, sequence, place.page, head};
        pair.copy(to(params.v_cache, params.v_cache_stride, head), from(params.v_new, params.v_new_stride, head),
                  [&](T x) { return cached.v(x); });
        const T *k = from(params.k_new, params.k_new_stride, head);
        T a = k[pair.a], b = k[pair.b];
        if constexpr (config::rotary)
            if (i < turning) turn(a, b, params, position, i);
        Element *k_cached = to(params.k_cache, params.k_cache_stride, head);
        k_cached[pair.a] = cached.k(a), k_cached[pair.b] = cached.k(b);
    }
}
