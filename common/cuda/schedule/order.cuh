// The order of a persistent grid's tiles: those that take long come first, so that all CTAs end together, and those that
// read the same K and V come together.
#pragma once
#include "schedule/l2_sections.cuh"
#include "schedule/packed.cuh"
#include "schedule/work_tile.cuh"
#include "tile/warpgroup_gemm.cuh"

// Tiles of block_m rows. Under a causal mask the first rows see the fewest keys. So tiles are counted from the last row's
// warpgroup then, and the one which is not full has the first rows. It begins above row 0, and is shorter. Without a mask
// all tiles cost the same, and they are counted from row 0.
template <int block_m, bool causal>
__device__ inline void set_rows(WorkTile &tile, int block, int blocks, int seqlen_q) {
    const int above = blocks * block_m - (seqlen_q + warpgroup_rows - 1) / warpgroup_rows * warpgroup_rows;
    const int first_row = block * block_m - (causal ? above : 0);
    tile.first_row = max(first_row, 0);
    tile.end_row = min(first_row + block_m, seqlen_q);
}

// Sequences of one length. Without a mask the rows of a head come first. With a causal mask the longest tiles of each head
// come first. If K and V of all heads are larger than `l2_share`, the heads are taken in sections that fit, but of at least
// one head of K and V.
template <int block_m, int head_dim, bool causal, int head_dim_v = head_dim>
struct DenseOrder {
    static constexpr int l2_share = 16 << 20;                                 // bytes
    static constexpr int l2_keys = l2_share / ((head_dim + head_dim_v) * 2);  // rows of K and V that fit into it

    const AttentionParams &params;
    const int blocks, heads, count;

    __device__ explicit DenseOrder(const AttentionParams &params_)
        : params(params_), blocks((params.seqlen_q + block_m - 1) / block_m), heads(params.num_heads * params.batch),
          count(blocks * heads) {}

    __device__ WorkTile find(int number) const {
        int block = number % blocks, any_head = number / blocks;
        if (causal) {
            const int group = params.num_heads / params.num_heads_k;
            const int section = min(max(l2_keys / params.seqlen_k, 1) * group, heads);
            longest_first(number, blocks, heads, section, block, any_head);
        }
        WorkTile tile;
        tile.head = any_head % params.num_heads, tile.head_k = tile.head / (params.num_heads / params.num_heads_k);
        tile.batch_q = tile.batch_k = any_head / params.num_heads;
        set_rows<block_m, causal>(tile, block, blocks, params.seqlen_q);
        tile.seqlen_q = params.seqlen_q, tile.seqlen_k = params.seqlen_k;
        tile.row_q = tile.row_k = 0;
        tile.lse = params.lse + (static_cast<long long>(tile.batch_q) * params.num_heads + tile.head) * params.seqlen_q;
        return tile;
    }
};

// Packed sequences, and one more: the rows behind the last one, which see no key. Sequences of about as many keys, up to a
// quarter more, are a class. The class of the longest ones comes first, and each is looked for among all sequences: 32 at a
// time, one a lane. So there is nothing to sort, and nothing to remember. All of it is done by a whole warp.
template <int block_m, int head_dim, bool causal, int head_dim_v = head_dim>
struct PackedOrder {
    static constexpr int l2_keys = (32 << 20) / ((head_dim + head_dim_v) * 2);  // rows of K and V in 32 MB
    static constexpr int few_keys = 256;  // up to so many are one class: to look at all sequences again takes longer
    const PackedParams &params;
    int count = 0;  // tiles of all heads

    __device__ explicit PackedOrder(const PackedParams &params_) : params(params_) {
        int longest = 0;
        for (int b = lane_index(); b <= params.batch; b += 32) {
            count += blocks(rows(b).length);
            longest = max(longest, class_of(keys(b).length));
        }
        count = __reduce_add_sync(0xffffffff, count) * params.num_heads;
        of_class = __reduce_max_sync(0xffffffff, longest);
        look();
    }

    // Numbers rise from call to call.
    __device__ WorkTile find(int number) {
        while (number >= (before_all + of_all) * params.num_heads) {
            before_all += of_all;
            first += 32;
            if (first > params.batch) {
                first = 0;
                of_class = __reduce_max_sync(0xffffffff, next_class);
                next_class = -1;
            }
            look();
        }
        const int within_all = number - before_all * params.num_heads;
        // Lanes before its own have no more tiles than those before it.
        const int lane = __popc(__ballot_sync(0xffffffff, (before + mine) * params.num_heads <= within_all));
        const int within = within_all - __shfl_sync(0xffffffff, before, lane) * params.num_heads;
        return tile(first + lane, within, __shfl_sync(0xffffffff, mine, lane));
    }

  private:
    int of_class, next_class = -1;  // the longest one that comes later, of what this lane has seen
    int first = 0;                  // sequence of the 32
    int before_all = 0, of_all;     // tiles of a head before these sequences', and theirs
    int before, mine;               // within them those before this lane's, and its

    // Looks at the 32 sequences from `first` on, as far as they are of this class.
    __device__ void look() {
        const int b = first + lane_index();
        mine = 0;
        if (b <= params.batch) {
            const int found = class_of(keys(b).length);
            if (found == of_class) mine = blocks(rows(b).length);
            if (found < of_class) next_class = max(next_class, found);
        }
        int upto = mine;
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            const int others = __shfl_up_sync(0xffffffff, upto, lanes);
            if (lane_index() >= lanes) upto += others;
        }
        before = upto - mine;
        of_all = __shfl_sync(0xffffffff, upto, 31);
    }
    // Within a sequence as in DenseOrder, but for sections of about the same size.
    __device__ WorkTile tile(int b, int within, int blocks) const {
        const int group = params.num_heads / params.num_heads_k;
        const Sequence q = rows(b), k = keys(b);
        int block = within % blocks, head = within / blocks;
        if (causal) {
            const int fitting = min(max(l2_keys / max(k.length, 1), 1), params.num_heads_k);
            const int sections = (params.num_heads_k + fitting - 1) / fitting;
            const int section = (params.num_heads_k + sections - 1) / sections * group;
            longest_first(within, blocks, params.num_heads, section, block, head);
        }
        WorkTile tile;
        set_rows<block_m, causal>(tile, block, blocks, q.length);
        tile.head = head, tile.head_k = head / group;
        tile.seqlen_q = q.length, tile.seqlen_k = k.length;
        tile.row_q = params.total_q - q.length, tile.row_k = params.total_k - k.length;
        tile.batch_q = q.begin + q.length, tile.batch_k = k.begin + k.length;
        tile.lse = params.lse + static_cast<long long>(head) * params.total_q + q.begin;
        return tile;
    }
    __device__ Sequence rows(int b) const { return rows_of(params, b); }
    __device__ Sequence keys(int b) const { return keys_of(params, b); }
    __device__ static int blocks(int rows) { return (rows + block_m - 1) / block_m; }
    // Exponent and two bits of the fraction.
    __device__ static int class_of(int keys) { return __float_as_int(static_cast<float>(max(keys, few_keys))) >> 21; }
};
