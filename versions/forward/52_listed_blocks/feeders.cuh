// The warps that bring consumers what they need of each block of keys that a work tile sees, from the last to the first.
#pragma once
#include "48_column_of_ones/drawn_mask.cuh"
#include "schedule/work_tile.cuh"
#include "softmax/dropout.cuh"

// The producer, one thread: Q of each work tile, and the blocks of K and V that it sees, from the last to the first.
template <bool packed, class Shared, class Maps, class Mask, class Blocks>
__device__ inline void load(Shared &shared, const Maps &maps, Mask &mask, Blocks blocks) {
    auto q = shared.q.producer();
    auto k = shared.k.producer(), v = shared.v.producer();
    blocks.wait();
#pragma unroll 1
    for (WorkTileReader work{shared.work};; work.advance()) {
        const WorkTile &tile = work.wait();
        if (tile.first_row == WorkTile::none) return;
        if constexpr (packed) mask.take(tile.seqlen_q, tile.seqlen_k);
        blocks.take([&](auto what) { return tile.*what; }, tile.first_row);
        const int head_k = tile.head_k, row_k = tile.row_k, batch_k = tile.batch_k;
        const int last = blocks.of_tile(tile.end_row) - 1;
        const int lowest = blocks.lowest(tile.first_row);
        if (last >= 0) shared.k.load(k, shared.k_tiles, maps.k, row_k + blocks.first_key(last), head_k, batch_k);
        shared.q.load(q, shared.q_tiles, maps.q, tile.row_q + tile.first_row, tile.head, tile.batch_q);
#pragma unroll 1
        for (int j = last; j >= lowest; --j) {
            if (j > lowest) shared.k.load(k, shared.k_tiles, maps.k, row_k + blocks.first_key(j - 1), head_k, batch_k);
            shared.v.load(v, shared.v_tiles, maps.v, row_k + blocks.first_key(j), head_k, batch_k);
            // Not earlier: another CTA may be free for the next tile sooner.
            if (j == min(last, lowest + 2)) shared.work.request();
        }
        if (last < 0) shared.work.request();
    }
}

// A drawer, a whole warp: masks of each work tile, of the blocks that the producer loads.
template <bool packed, class Shared, class Params, class Mask, class Blocks>
__device__ inline void draw(Shared &shared, const Params &params, Mask &mask, Blocks blocks) {
    Dropout<true> dropping{params, 0, 0};
    auto masks = shared.masks.producer();
    WorkTileReader work{shared.work};
    blocks.wait();
    for (int first_row; (first_row = work.first_row()) != WorkTile::none;) {
        if constexpr (packed) mask.take(work.get(&WorkTile::seqlen_q), work.get(&WorkTile::seqlen_k));
        blocks.take([&](auto what) { return work.get(what); }, first_row);
        const int last = blocks.of_tile(work.get(&WorkTile::end_row)) - 1;
        const int lowest = blocks.lowest(first_row);
        dropping.of_head(params, sequence_of(params, work), work.get(&WorkTile::head));
        work.advance();
        __syncwarp();  // all lanes have read the tile
        work.release(true);
#pragma unroll 1
        for (int j = last; j >= lowest; --j) shared.masks.draw(masks, dropping, first_row, blocks.first_key(j));
    }
}
