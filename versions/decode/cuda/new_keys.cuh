// New keys of each sequence, which come behind those in its cache.
#pragma once
#include "packed_rows.cuh"
#include "skipped_keys.cuh"
#include "written_keys.cuh"

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

using GrowingCache = std::conditional_t<config::new_keys, NewKeys<PaddedCache>, PaddedCache>;
using AppendParams = Seen<std::conditional_t<config::rotary, Rotary<GrowingCache>, GrowingCache>>;

// Whether there is memory for a key. A page that is none is read as the last one, which is another sequence's.
__device__ inline bool has_place(const SplitParams &params, int, int key) { return key < params.seqlen_k; }
__device__ inline bool has_place(const PagedParams &params, int sequence, int key) {
    if (key >= params.seqlen_k) return false;
    const long long first = sequence * static_cast<long long>(params.max_pages);
    return static_cast<unsigned>(params.block_table[first + key / params.page_size]) < params.num_pages;
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

// Writes new key `row` of a sequence and its value, by the whole CTA, as `Cached` has numbers.
template <class T, template <class> class Cached = Kept, class Params>
__device__ inline void append_key(const Params &params, int sequence, int row) {
    const int key = params.keys_before(sequence) + row;
    if (!has_place(params, sequence, key)) return;
    write_key<T, Cached>(params, KeyPlace::find(params, sequence, key, key + 1), sequence, row, key);
}
