// Tiles of packed rows, of a batch or of sequences that lie one behind the other, and which sequence a tile is of.
#pragma once
#include "24_woven_general/narrower.cuh"
#include "packed_rows.cuh"
#include "scaled_cache.cuh"
#include "schedule/packed.cuh"
#include "seen_keys.cuh"
#include "tile/rows.cuh"

// Sequence b has the rows from cu_seqlens_q[b] up to cu_seqlens_q[b + 1] of all seqlen_q. q, o and lse are of one batch.
template <class Params>
struct PackedQ : Params {
    const int *cu_seqlens_q;
    FLASHLADDER_FURTHER_FIELDS(Params, cu_seqlens_q)
};
using PackedCache = std::conditional_t<config::packed_q, PackedQ<SlopedCache>, SlopedCache>;
using ScaledRows = std::conditional_t<config::fp8_cache, Scaled<PackedCache>, PackedCache>;
using RowParams = std::conditional_t<config::narrower, Narrower<ScaledRows>, ScaledRows>;

// Where a tile is: its number in its sequence, where that begins in the batch of Q, and how many rows and keys it has.
struct TilePlace {
    int sequence, tile, of_q, begin, rows, keys;

    // In a batch.
    template <class Params>
    __device__ static TilePlace in_batch(const Params &params, int tile, int sequence) {
        return {sequence, tile, sequence, 0, params.seqlen_q, params.keys_of(sequence)};
    }

    // Tile `number` of packed sequences, found by a warp. A sequence's tiles are numbered from its first packed row on, in
    // tiles, and one more for each sequence before it: so none needs to know how many tiles the others have, and some
    // numbers are of no tile. Rows behind the last sequence are one more, without keys: it is written too.
    template <int block_m, class Params>
    __device__ static TilePlace find(const Params &params, int number) {
        auto first_tile = [&](int b) {
            const int begin = min(max(params.cu_seqlens_q[b], 0), params.seqlen_q);
            return static_cast<int>(static_cast<long long>(begin) * params.group() / block_m) + b;
        };
        int found = 0, count = params.batch + 1;  // it is one of so many
        while (count > 1) {
            const int apart = (count + 31) / 32, mine = lane_index() * apart;
            const bool begins = mine < count && first_tile(found + mine) <= number;
            const int before = max(__popc(__ballot_sync(0xffffffff, begins)) - 1, 0) * apart;
            found += before;
            count = min(apart, count - before);
        }
        const bool is_rest = found == params.batch;
        const int end = is_rest ? params.seqlen_q : params.cu_seqlens_q[found + 1];
        const Sequence sequence{params.cu_seqlens_q[found], end, params.seqlen_q};
        const int tile = number - first_tile(found);
        if (tile < 0) return {};  // before the first sequence
        if (is_rest) return {params.batch - 1, tile, 0, sequence.begin, sequence.length, 0};
        return {found, tile, 0, sequence.begin, sequence.length, params.keys_of(found)};
    }
};

// That of tile `number` of the CTA's sequence, or of all where sequences are packed.
template <int block_m, class Params>
__device__ inline TilePlace place_of(const Params &params, int number) {
    if constexpr (config::packed_q)
        return TilePlace::find<block_m>(params, number);
    else
        return TilePlace::in_batch(params, number, blockIdx.z);
}

// As PackedRows, of a sequence with rows of its own.
template <int rows>
struct RowTile : PackedRows<rows> {
    int of_q, begin;

    // Part `part` of so many of a tile.
    __device__ RowTile(const DecodeParams &params, const TilePlace &at, int head_k, int part = 0, int parts = 1)
        : PackedRows<rows>(params, at.tile * parts + part, head_k, at.sequence), of_q(at.of_q), begin(at.begin) {
        this->seqlen_q = at.rows;
    }
    // Where packed row i begins in Q or O, and its place in lse.
    template <class T, class Tensor>
    __device__ T *element(Tensor *tensor, const TensorStride &stride, int i) const {
        return static_cast<T *>(tensor) + of_q * stride.batch + (begin + this->row(i)) * stride.row + this->head(i) * stride.head;
    }
    __device__ long long in_lse(const DecodeParams &params, int i) const {
        return params.row_index(of_q, this->head(i), begin + this->row(i));
    }
};

// The other way round than copy_part_by_warp: `count` rows of a tile from row `at` on go to where each begins.
template <class Tile, int count, class T, class Row, class Has>
__device__ inline void store_part_by_warp(const T *shared, int at, Row row, Has has) {
    const int col = lane_index() % 8 * 8;
#pragma unroll
    for (int first = 0; first < count; first += 4) {
        const int r = first + lane_index() / 8;
        T *to = row(r);
#pragma unroll
        for (int panel = 0; panel < Tile::cols; panel += 64)
            if ((Tile::cols % 64 == 0 || panel + col < Tile::cols) && has(r, panel + col))
                store_global_16_no_allocate(to + panel + col,
                                            load_shared_16(shared_address(shared + Tile::offset(at + r, panel + col))));
    }
}

// O /= l of a warp's rows, with their sinks, and their log-sum-exps to memory. A row that sees no key has 0 and -inf.
template <class Params, class Tile, class Softmax, int cols>
__device__ inline void finish_rows(const Params &params, const Tile &tile, const Softmax &softmax, Accumulator<16, cols> &o) {
    each_row([&](int h) {
        const int i = h * 8 + accumulator_row();
        const float sum = quad_sum(softmax.l[0][h]);
        float lse = softmax.m[0][h] + __log2f(sum), share = sum > 0.0f ? 1.0f / sum : 0.0f;
        if constexpr (config::sinks) {
            Sink<config::sinks> sink;
            sink.take(params, tile.head(i));
            share *= sink.share(lse);
            lse = sink.in_log(lse);
        }
        scale_row(o, h, share);
        if (params.lse != nullptr && lane_index() % 4 == 0 && tile.has(i)) params.lse[tile.in_lse(params, i)] = lse * ln_2;
    });
}
