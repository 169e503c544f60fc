// Tiles of packed rows, of sequences that lie one behind the other.
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
using PackedCache = PackedQ<SlopedCache>;
using ScaledRows = std::conditional_t<config::fp8_cache, Scaled<PackedCache>, PackedCache>;
using RowParams = std::conditional_t<config::narrower, Narrower<ScaledRows>, ScaledRows>;

// Where a tile is: its number in its sequence, where that begins, and how many rows and keys it has.
struct TilePlace {
    int sequence, tile, begin, rows, keys;
};

// As PackedRows, of a sequence with rows of its own.
template <int rows>
struct RowTile : PackedRows<rows> {
    int begin;

    // Part `part` of so many of a tile.
    __device__ RowTile(const DecodeParams &params, const TilePlace &at, int head_k, int part = 0, int parts = 1)
        : PackedRows<rows>(params, at.tile * parts + part, head_k, at.sequence), begin(at.begin) {
        this->seqlen_q = at.rows;
    }
    // Where packed row i begins in Q or O, and its place in lse.
    template <class T, class Tensor>
    __device__ T *element(Tensor *tensor, const TensorStride &stride, int i) const {
        return static_cast<T *>(tensor) + (begin + this->row(i)) * stride.row + this->head(i) * stride.head;
    }
    __device__ long long in_lse(const DecodeParams &params, int i) const {
        return params.row_index(0, this->head(i), begin + this->row(i));
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
