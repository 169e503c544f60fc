// New keys of each sequence, which come behind those in its cache, and rotary embeddings (Su et al., arXiv:2104.09864).
#pragma once
#include "packed_rows.cuh"
#include "skipped_keys.cuh"

// k_new and v_new are (batch, seqlen_new, num_heads_k, head_dim).
template <class Params>
struct NewKeys : Params {
    const void *k_new, *v_new;
    TensorStride k_new_stride, v_new_stride;
    int seqlen_new;
    FLASHLADDER_FURTHER_FIELDS(Params, k_new, v_new, k_new_stride, v_new_stride, seqlen_new)

    // Of a sequence, before and after.
    __device__ int keys_before(int sequence) const { return Params::keys_of(sequence); }
    __device__ int keys_of(int sequence) const { return min(keys_before(sequence) + seqlen_new, Params::seqlen_k); }
};

// Tables (rotary_positions, rotary_dim / 2), of one row for each place in a cache at least. The first rotary_dim columns
// turn.
template <class Params>
struct Rotary : Params {
    const void *rotary_cos, *rotary_sin;
    int rotary_dim, rotary_positions;
    FLASHLADDER_FURTHER_FIELDS(Params, rotary_cos, rotary_sin, rotary_dim, rotary_positions)
};

using GrowingCache = std::conditional_t<config::new_keys, NewKeys<PaddedCache>, PaddedCache>;
using AppendParams = Seen<std::conditional_t<config::rotary, Rotary<GrowingCache>, GrowingCache>>;

// Whether there is memory for a key. A page that is none is read as the last one, which is another sequence's.
__device__ inline bool has_place(const SplitParams &params, int, int key) { return key < params.seqlen_k; }
__device__ inline bool has_place(const PagedParams &params, int sequence, int key) {
    if (key >= params.seqlen_k) return false;
    const long long first = sequence * static_cast<long long>(params.max_pages);
    return static_cast<unsigned>(params.block_table[first + key / params.page_size]) < params.num_pages;
}

// Two columns of a row, which may turn together.
struct ColumnPair {
    int a, b;

    // Pair i of head_dim / 2; the first `turning` ones turn.
    __device__ ColumnPair(int i, int turning) : a(2 * i), b(2 * i + 1) {
        if (!config::rotary_interleaved && i < turning) a = i, b = i + turning;
    }
    template <class T>
    __device__ void copy(T *to, const T *from) const {
        to[a] = from[a], to[b] = from[b];
    }
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

// Turns a tile of Q in shared memory, by the whole CTA, which has read it. A row is at its own key's position, counted from
// the first new key; without an order of rows all are at that one's.
template <class Tile, int rows, class T, class Params>
__device__ inline void turn_q(T *shared, const PackedRows<rows> &tile, const Params &params) {
    if constexpr (config::rotary) {
        const int turning = params.rotary_dim / 2, first = params.keys_before(tile.batch);
        for (int n = threadIdx.x; n < rows * turning; n += blockDim.x) {
            const int r = n / turning, i = n % turning;
            const ColumnPair pair{i, turning};
            const int position = first + (config::causal || config::window ? tile.row(r) : 0);
            turn(shared[Tile::offset(r, pair.a)], shared[Tile::offset(r, pair.b)], params, position, i);
        }
        __syncthreads();  // before any warp reads them
    }
}

// Writes new key `row` of a sequence and its value, in all heads, by the whole CTA.
template <class T, class Params>
__device__ inline void append_key(const Params &params, int sequence, int row) {
    constexpr int pairs = config::head_dim / 2;
    const int key = params.keys_before(sequence) + row;
    if (!has_place(params, sequence, key)) return;
    const KeyPlace place = KeyPlace::find(params, sequence, key, key + 1);
    const auto from = [&](const void *tensor, TensorStride stride, int head) {
        return static_cast<const T *>(tensor) + sequence * stride.batch + row * stride.row + head * stride.head;
    };
    const auto to = [&](const void *cache, TensorStride stride, int head) {
        return const_cast<T *>(static_cast<const T *>(cache)) + place.page * stride.batch + place.row * stride.row +
               head * stride.head;
    };
    int turning = 0;
    if constexpr (config::rotary) turning = params.rotary_dim / 2;
    for (int n = threadIdx.x; n < params.num_heads_k * pairs; n += blockDim.x) {
        const int head = n / pairs, i = n % pairs;
        const ColumnPair pair{i, turning};
        pair.copy(to(params.v_cache, params.v_cache_stride, head), from(params.v_new, params.v_new_stride, head));
        const T *k = from(params.k_new, params.k_new_stride, head);
        T a = k[pair.a], b = k[pair.b];
        if constexpr (config::rotary)
            if (i < turning) turn(a, b, params, key, i);
        T *k_cached = to(params.k_cache, params.k_cache_stride, head);
        k_cached[pair.a] = a, k_cached[pair.b] = b;
    }
}
