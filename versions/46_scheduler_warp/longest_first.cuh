// The order of packed sequences: the longest ones first, so that what is drawn last is short.
#pragma once
#include "46_scheduler_warp/scheduler.cuh"
#include "schedule/from_the_end.cuh"
#include "schedule/packed.cuh"

// The rows of one of a sequence's tiles, counted as in OrderFromEnd. Where that begins above row 0, the tile is shorter.
template <int block_m, bool causal>
__device__ inline void set_rows(Turn &turn, int block, int blocks, int seqlen_q) {
    const int first_row = block * block_m - (causal ? rows_above<block_m>(blocks, seqlen_q) : 0);
    turn.first_row = max(first_row, 0);
    turn.end_row = min(first_row + block_m, seqlen_q);
}

// Tensors in which each sequence has a number of its own.
template <int block_m, int head_dim, bool causal>
struct ApartTiles : TileOrder<block_m, head_dim, causal> {
    using Order = TileOrder<block_m, head_dim, causal>;
    using Order::Order;

    __device__ Turn find(int number) const {
        const auto tile = Order::tile(number);
        const auto &params = this->params;
        Turn turn;
        set_rows<block_m, causal>(turn, tile.first_row / block_m, this->blocks, params.seqlen_q);
        turn.head = tile.head, turn.head_k = tile.head_k;
        turn.seqlen_q = params.seqlen_q, turn.seqlen_k = params.seqlen_k;
        turn.row_q = turn.row_k = 0;
        turn.of_q = turn.of_k = tile.batch;
        turn.lse = Order::lse(tile.head, tile.batch);
        return turn;
    }
};

// Packed sequences, and one more: the rows behind the last one, which see no key. Sequences of about as many keys, up to a
// quarter more, are a class. The class of the longest ones comes first, and each is looked for among all sequences: 32 at a
// time, one a lane. So there is nothing to sort, and nothing to remember. All of it is done by a whole warp.
template <int block_m, int head_dim, bool causal>
struct LongestFirst {
    static constexpr int l2_keys = (32 << 20) / (2 * head_dim * 2);  // rows of K and V in 32 MB
    static constexpr int few_keys = 256;  // up to so many are one class: to look at all sequences again takes longer
    const PackedParams &params;
    int count = 0;  // tiles of all heads

    __device__ explicit LongestFirst(const PackedParams &params_) : params(params_) {
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
    __device__ Turn find(int number) {
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
        return turn(first + lane, within, __shfl_sync(0xffffffff, mine, lane));
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
    // Within a sequence as in TileOrder.
    __device__ Turn turn(int b, int within, int blocks) const {
        const int group = params.num_heads / params.num_heads_k;
        const Sequence q = rows(b), k = keys(b);
        int block = within % blocks, head = within / blocks;
        if (causal) {
            const int fitting = min(max(l2_keys / max(k.length, 1), 1), params.num_heads_k);
            const int sections = (params.num_heads_k + fitting - 1) / fitting;
            const int section = (params.num_heads_k + sections - 1) / sections * group;  // all of about the same size
            longest_first(within, blocks, params.num_heads, section, block, head);
        }
        Turn turn;
        set_rows<block_m, causal>(turn, block, blocks, q.length);
        turn.head = head, turn.head_k = head / group;
        turn.seqlen_q = q.length, turn.seqlen_k = k.length;
        turn.row_q = params.total_q - q.length, turn.row_k = params.total_k - k.length;
        turn.of_q = q.begin + q.length, turn.of_k = k.begin + k.length;
        turn.lse = params.lse + static_cast<long long>(head) * params.total_q + q.begin;
        return turn;
    }
    __device__ Sequence rows(int b) const {
        return {__ldg(params.cu_seqlens_q + b), b < params.batch ? __ldg(params.cu_seqlens_q + b + 1) : params.total_q,
                params.total_q};
    }
    __device__ Sequence keys(int b) const {
        return {__ldg(params.cu_seqlens_k + b), __ldg(params.cu_seqlens_k + min(b + 1, params.batch)), params.total_k};
    }
    __device__ static int blocks(int rows) { return (rows + block_m - 1) / block_m; }
    // Exponent and two bits of the fraction.
    __device__ static int class_of(int keys) { return __float_as_int(static_cast<float>(max(keys, few_keys))) >> 21; }
};
