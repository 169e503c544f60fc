// Which tile a CTA has, and where its sequence lies in the tensors.
#pragma once
#include "key_mask.cuh"
#include "sequence.cuh"

// The first of some rows or keys, and the last one; none where that is before it.
struct Span {
    int first, last;
};

// A tile of a sequence, and a head.
struct TilePlace {
    int number, head, batch;

    // Whether it has any of so many rows or keys.
    __device__ bool is_in(int length, int block) const { return number >= 0 && number * block < length; }
    // What it has of the tensor's rows or keys behind the last of so many sequences, which are `behind` from that one's first.
    __device__ Span behind_last(int count, int length, int end, int block) const {
        if (batch != count - 1 || number < 0) return {0, -1};
        const int first = length + (number - (length + block - 1) / block) * block;
        return {first, min(first + block, end) - 1};
    }
};

// Packed sequence b has places for its tiles from begin / block + b on. No two sequences share a place: the rows before one
// fill begin / block tiles, and each sequence adds at most one that is not full. The sequence of a place is the last one
// whose places begin there or before; a warp looks for it, 32 sequences at a time. Few places are empty.
template <int block>
__device__ inline TilePlace packed_place(const int *cu_seqlens, int batch, int total, int place = blockIdx.x) {
    auto first_place = [&](int b) { return min(max(__ldg(cu_seqlens + b), 0), total) / block + b; };
    int first = 0;
    for (int count = batch; count > 1;) {
        const int step = (count + 31) / 32, within = lane_index() * step;
        const bool is_before = within < count && first_place(first + within) <= place;
        const int chosen = max(__popc(__ballot_sync(0xffffffff, is_before)) - 1, 0) * step;
        first += chosen;
        count = min(step, count - chosen);
    }
    return {place - first_place(first), static_cast<int>(blockIdx.y), first};
}

// The rows of Q of a CTA of a pass.
template <bool packed, class Params>
__device__ inline TilePlace rows_of_cta(const Params &p) {
    if constexpr (packed) return packed_place<config::block_m>(p.cu_seqlens_q, p.batch, p.total_q);
    return {static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z)};
}

// The keys of a CTA of the loop. CTAs begin with the first keys of a head, or with the last ones. Packed sequences have sections of
// heads where CTAs add in turn: those that wait for each other are launched less close together.
template <bool packed, bool by_sections, class Params>
__device__ inline TilePlace keys_of_cta(const Params &p, bool from_last_keys = false) {
    if constexpr (packed && !config::deterministic) return packed_place<config::block_n>(p.cu_seqlens_k, p.batch, p.total_k);
    const KeyTile<config::head_dim, by_sections, 16, false> tile{p};
    TilePlace place{from_last_keys ? static_cast<int>(gridDim.x) - 1 - tile.number : tile.number, tile.head, tile.batch};
    if constexpr (packed) {
        place = packed_place<config::block_n>(p.cu_seqlens_k, p.batch, p.total_k, place.number);
        place.head = tile.head;
    }
    return place;
}

// The tiles of Q of all heads that share a head of K, as far as they have any of the rows from `first_row` up to `end_row`: from
// the last tile to the first one, each of all heads. So CTAs that begin together stay together, whatever their keys see, and
// those that add in turn are one step apart.
struct PassingTiles {
    int head, number;  // of the tile that passes
    int first, first_head, heads;

    __device__ PassingTiles(int first_row, int end_row, int first_head_, int heads_)
        : head(first_head_), number((end_row + config::block_m - 1) / config::block_m - 1),
          first(first_row / config::block_m), first_head(first_head_), heads(heads_) {}

    __device__ int count() const { return (number + 1 - first) * heads; }  // before any has passed

    __device__ void advance() {
        if (++head < first_head + heads) return;
        head = first_head;
        --number;
    }
};

// Where tensor maps have the first row of a sequence, and their last coordinate. Maps of packed tensors end where the sequence
// ends: their last coordinate says where that is, and their rows count so that the sequence's last one is the map's.
struct MapPlace {
    int first, last;
};
template <bool packed, class Work>
__device__ inline MapPlace place_of_rows(const Work &work) {
    if constexpr (packed) return {work.p.total_q - work.seqlen_q, work.first_q + work.seqlen_q};
    return {0, work.batch};
}
template <bool packed, class Work>
__device__ inline MapPlace place_of_keys(const Work &work) {
    if constexpr (packed) return {work.p.total_k - work.seqlen_k, work.first_k + work.seqlen_k};
    return {0, work.batch};
}
