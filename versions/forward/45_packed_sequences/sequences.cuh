// Packed sequences on a persistent grid: which tiles there are, and where a tile's sequence lies in its tensors.
#pragma once
#include "39_shorter_turn/placed_tiles.cuh"
#include "42_from_the_end/from_the_end.cuh"
#include "schedule/packed.cuh"

// The sequence of a tile, as tensor maps have it: its row r is their row `row_q` + r, at their last coordinate `of_q`.
// Maps of packed tensors end where the sequence ends. Their last coordinate says where that is, and their rows count so
// that the sequence's last one is the map's: what is behind it comes as zeros, and is not stored.
struct Extent {
    int seqlen_q, seqlen_k, row_q, row_k, of_q, of_k;
};

// Tensors in which each sequence has a number of its own.
template <int block_m, int head_dim, bool uneven>
struct ApartOrder : OrderFromEnd<block_m, head_dim, uneven> {
    using Order = OrderFromEnd<block_m, head_dim, uneven>;
    using Drawer = PlacedTileDrawer<Order>;
    using Order::Order;

    __device__ Extent extent(int batch) const {
        return {this->params.seqlen_q, this->params.seqlen_k, 0, 0, batch, batch};
    }
    __device__ float *lse(int head, const Extent &extent) const { return Order::lse(head, extent.of_q); }
};

// Packed sequence b has places for its tiles from begin / block_m + b on. No two sequences share a place: the rows before
// one fill begin / block_m tiles, and each sequence adds at most one tile that is not full. So a place's sequence is found
// without a sum of all lengths. At most `batch` places are empty. Late places come first: a causal mask shows more there.
template <int block_m>
struct PackedOrder {
    const PackedParams &params;
    const int places, count;

    __device__ explicit PackedOrder(const PackedParams &params_)
        : params(params_), places(params.total_q / block_m + params.batch), count(places * params.num_heads) {}

    static constexpr int empty = PlacedTileQueue::none - 1;  // instead of the first row of a tile without rows

    // First row, head, head of K and V, and the sequence's number: `known` at most, and from then on known.
    __device__ int4 tile(int number, int &known) const {
        const int place = places - 1 - number / params.num_heads, head = number % params.num_heads;
        // The last sequence whose places begin here or before. From a CTA's last tile it is seldom far.
        int batch = known, end = known + 1;
        for (int step = 1; batch > 0 && first_place(batch) > place; step *= 2)
            end = batch, batch = max(batch - step, 0);
        while (end - batch > 1) {
            const int middle = (batch + end) / 2;
            (first_place(middle) <= place ? batch : end) = middle;
        }
        known = batch;
        const int first_row = (place - first_place(batch)) * block_m;
        const bool has_rows = first_row < rows(batch).length && first_row >= 0;
        return {has_rows ? first_row : empty, head, head / (params.num_heads / params.num_heads_k), batch};
    }
    __device__ Extent extent(int batch) const {
        const auto q = rows(batch), k = sequence(params.cu_seqlens_k, batch, params.total_k);
        return {q.length, k.length, params.total_q - q.length, params.total_k - k.length, q.begin + q.length, k.begin + k.length};
    }
    __device__ float *lse(int head, const Extent &extent) const {
        return params.lse + static_cast<long long>(head) * params.total_q + extent.of_q - extent.seqlen_q;
    }

    struct Drawer : PlacedTileDrawer<PackedOrder> {
        bool has_begun = false;
        int known = this->order.params.batch - 1;  // no later sequence has a tile that is still to be drawn

        __device__ int4 draw() {
            int4 tile{empty, 0, 0, 0};
            while (tile.x == empty) {
                const int number = has_begun ? this->next() : blockIdx.x;
                has_begun = true;
                tile = number < this->order.count ? this->order.tile(number, known) : int4{PlacedTileQueue::none, 0, 0, 0};
            }
            return this->hand_over(tile);
        }
    };

  private:
    __device__ int first_place(int batch) const { return rows(batch).begin / block_m + batch; }
    __device__ Sequence rows(int batch) const { return sequence(params.cu_seqlens_q, batch, params.total_q); }
    // Through L1: a producer that waits for L2 at each step of its search brings nothing meanwhile.
    __device__ static Sequence sequence(const int *cu_seqlens, int batch, int total) {
        return {__ldg(cu_seqlens + batch), __ldg(cu_seqlens + batch + 1), total};
    }
};
