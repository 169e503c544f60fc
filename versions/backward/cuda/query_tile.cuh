// The tiles of Q whose rows see a tile of keys.
#pragma once
#include "backward_params.cuh"

// A tile of Q, of all heads that share a head of K, one head behind the other. The last tile of a head may be cut.
struct QueryTiles {
    int head, number;
    int first, end, heads;  // tiles of each head

    __device__ QueryTiles(const BackwardParams &p, int first_row, int first_head, int heads_)
        : head(first_head), number(first_row / config::block_m), first(number),
          end((p.seqlen_q + config::block_m - 1) / config::block_m), heads(heads_) {}

    __device__ int count() const { return (end - first) * heads; }

    __device__ void advance() {
        if (++number < end) return;
        number = first;
        ++head;
    }
};

// The same, from the last tile of a head to the first one.
struct QueryTilesFromTheEnd : QueryTiles {
    __device__ QueryTilesFromTheEnd(const BackwardParams &p, int first_row, int first_head, int heads_)
        : QueryTiles(p, first_row, first_head, heads_) {
        number = end - 1;
    }

    __device__ void advance() {
        if (--number >= first) return;
        number = end - 1;
        ++head;
    }
};
