// What rungs for Hopper that take any attention share: which rows and keys there are, and the launches of the passes around
// their loop. Their argument is `Params`, which is named before this is included.
#pragma once
#include "bounded_key_mask.cuh"
#include "pipeline/tma.cuh"
#include "places.cuh"
#include "ptx/griddepcontrol.cuh"
#include "weights.cuh"

using Work = BackwardSequence<Params, config::packed>;
using Mask = BoundedKeyMask<config::causal, config::window>;

__device__ inline Mask mask_of(const Work &work) {
    Mask mask{work.p};
    if constexpr (config::packed) mask.take(work.seqlen_q, work.seqlen_k);
    return mask;
}
// Whether a tile of rows sees any keys: nobody writes the sums of dQ of another one.
__device__ inline bool sees_keys(const Work &work, int first_row) {
    const Mask mask = mask_of(work);
    return mask.end_key(min(first_row + config::block_m, work.seqlen_q) - 1) > mask.first_key(first_row);
}

// Within a window as many rows see each key. Additions in order begin with the first keys.
constexpr bool by_sections = (config::causal && !config::window) || config::deterministic;

FLASHLADDER_WORKSPACE(lse_log2, float, "num_heads * (total_q // block_m + batch) * block_m");
FLASHLADDER_WORKSPACE(delta, float, "num_heads * (total_q // block_m + batch) * block_m");
struct CountedWorkspaces : PaddedWorkspaces {
    unsigned *added;  // to each part of a tile of dQ: tiles of keys
};

constexpr Launch pass(int threads, int shared_bytes = 0) {
    const Launch plain{static_cast<unsigned>(threads), static_cast<unsigned>(shared_bytes), config::block_m};
    return config::packed ? plain.over("total_q // block_m + batch + 1", "num_heads", "1") : plain;
}
constexpr Launch last_pass(int threads, int shared_bytes) {
    const Launch over_rows = pass(threads, shared_bytes).dependent();
    return config::wants_dq ? over_rows : over_rows.over("0", "0", "0");
}
// The loop's, of which a CTA has a tile of keys, of each of so many heads.
template <int length>
constexpr Launch over_tiles_of_keys(const Launch &launch, const char (&heads)[length]) {
    return config::packed ? launch.over("total_k // block_n + batch + 1", heads, "1")
                          : launch.over("cdiv(seqlen_k, block_n)", heads, "batch");
}

// A producer: the tiles of Q or dO, each with what is known of its rows.
template <class Ring, class Tiles>
__device__ inline void load_tiles(Ring &ring, const TensorMapBytes &map, const float *of_rows, const Work &work,
                                  Tiles tiles) {
    wait_for_dependency();  // what the pass before writes is there
    const MapPlace rows = place_of_rows<config::packed>(work);
    auto at = ring.producer();
#pragma unroll 1
    for (int left = tiles.count(); left > 0; --left, tiles.advance(), at.advance())
        ring.load(at, map, rows.first + tiles.number * config::block_m, tiles.head, rows.last,
                  of_rows + work.padded_row(tiles.head, tiles.number));
}

// Zeros for rows of dK or dV.
template <int num_threads, int cols, class T, class Columns>
__device__ inline void clear_rows(T *head, long long row_stride, int first, int last, const Columns &columns) {
    constexpr int chunks = cols / chunk;
    for (int i = threadIdx.x; i < (last + 1 - first) * chunks; i += num_threads)
        if (const int col = i % chunks * chunk; columns.has(col))
            store_global_16(head + (first + i / chunks) * row_stride + col, {});
}
// The gradients of keys that no row sees.
template <int num_threads>
__device__ inline void clear_gradients(const Work &work, int head_k, int first_key, int last_key) {
    const Params &p = work.p;
    clear_rows<num_threads, config::head_dim>(work.like_k(p.dk, p.dk_stride, head_k), p.dk_stride.row, first_key, last_key,
                                              columns_of<config::narrower>(p));
    clear_rows<num_threads, config::head_dim_v>(work.like_k(p.dv, p.dv_stride, head_k), p.dv_stride.row, first_key, last_key,
                                                columns_of_v<config::narrower>(p));
}

// The same of rows and keys behind the last packed sequence, by places that no tile of a sequence has.
template <int num_threads>
__device__ inline void clear_rows_behind(const Work &work, const TilePlace &place) {
    const Params &p = work.p;
    const Span rows = place.behind_last(p.batch, work.seqlen_q, work.total_q() - work.first_q, config::block_m);
    if constexpr (config::wants_dq)
        clear_rows<num_threads, config::head_dim>(work.like_q(p.dq, p.dq_stride, place.head), p.dq_stride.row, rows.first, rows.last,
                                                  columns_of<config::narrower>(p));
    for (int row = rows.first + threadIdx.x; row <= rows.last; row += num_threads) work.pull_sink(place.head, row, -INFINITY, 0.0f);
}
template <int num_threads>
__device__ inline void clear_keys_behind(const Work &work, const TilePlace &place) {
    const Span keys = place.behind_last(work.p.batch, work.seqlen_k, work.total_k() - work.first_k, config::block_n);
    if constexpr (config::wants_dkv) clear_gradients<num_threads>(work, place.head, keys.first, keys.last);
}
