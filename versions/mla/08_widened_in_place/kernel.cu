// Rows of the cache that lie anywhere, in 8 or in 16 bits, come by asynchronous copies to where wgmma reads them; warps widen
// 8-bit ones there. A sequence's rows are those of its pages, or those of a list. The roles of a CTA:
//
//     producers, one or two warpgroups   each copies rows of every other block, or of all, and widens them in the ring
//     groups 0 and 1                     S of every other block each, and its P for both; O += P V of half of the columns each
//
//     group 0    S(0)   softmax(0)    O += P(0) V(0)                 O += P(1) V(1)   S(2) ...
//     group 1           S(1)          O += P(0) V(0)   softmax(1)    O += P(1) V(1)          S(3) ...
//
// The barriers:
//
//     ring           full: a producer's warps have their rows of a block there, in 16 bits. empty: both groups have read it
//     both_groups    Q is there for both groups; and at the end, the sums of all keys are
//     has_passed     of a group: its P and m are there for the other one
#include "combine_in_time.cuh"
#include "config.cuh"
#include "decode/cuda/equal_parts.cuh"
#include "passed_softmax.cuh"
#include "pipeline/roles.cuh"
#include "row_copier.cuh"

using namespace config;

constexpr int groups = 2;
constexpr int consumers = groups * warpgroup_threads;  // then come the producers
constexpr int rows = warpgroup_rows;
constexpr int group_cols = head_dim_v / groups;  // of O
constexpr bool one_wave = true;  // an SM has room for one CTA: one part more than SMs would take as long again
constexpr int widest = num_producers == 1 ? 256 : 128;  // product that has its registers before any are taken from producers
constexpr int sum_cols = group_cols < widest ? group_cols : widest, sums = group_cols / sum_cols;

using QTile = SwizzledPanels<rows, head_dim>;
using KVTile = SwizzledPanels<block_n, head_dim>;
using PTile = SwizzledPanels<rows, block_n>;
using Softmax = PassedSoftmax<rows>;
constexpr int of_producer = num_producers == 1 ? 88 : 48;
using Share = Registers<groups, 1, of_producer, num_producers - 1, of_producer>;
using Ring = RowRing<KVTile, dtype, head_dim <= 192 ? 6 : 2>;

constexpr int both_groups = 1, has_passed = 2;  // the last: for each group

struct Shared {
    Ring ring;
    alignas(1024) dtype q[QTile::size];
    dtype p[PTile::size];
    Softmax::Shared softmax;
    Part blocks;  // of the sequence, that are the CTA's
};

FLASHLADDER_KERNEL(attention_mla, RowParams,
                   Launch{Share::num_threads, sizeof(Shared), rows, block_n}
                       .over("cdiv(num_heads * seqlen_q, 64 * num_heads_k)", "num_heads_k * num_parts", "1"));

// Of the CTA, from what it has in shared memory: in loops registers are few.
__device__ inline LatentPart<rows, block_n, causal, RowParams> part_of(const RowParams &params, const Part &blocks) {
    const int number = cta_index().y / params.num_heads_k, head_k = cta_index().y - number * params.num_heads_k;
    return {params, blocks.sequence, head_k, number, blocks.first_block(0), blocks.first_block(1)};
}

template <class Sum>
__device__ inline void each_sum(Sum sum) {
#pragma unroll
    for (int i = 0; i < sums; ++i) sum(i);
}

extern "C" __global__ void __launch_bounds__(Share::num_threads, 1)
    attention_mla(const __grid_constant__ RowParams params, const __grid_constant__ Partials partials) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    auto &ring = shared.ring;
    auto first_col = [&](int i) { return uniform_warp_index() / 4 * group_cols + i * sum_cols; };
    const int group = uniform_warp_index() / 4, warp_row = warp_index() % 4 * 16;

    const Part found = find_part<block_n, one_wave>(params, blockIdx.y / params.num_heads_k);
    if (found.sequence < 0) return;  // there are fewer parts
    launch_where_room(params, found);
    if (threadIdx.x == 0) {
        shared.blocks = found;
        ring.init(consumers / 32);
    }
    __syncthreads();  // the barriers are made
    if (group >= groups) {
        release_registers<Share::producer>();
        RowCopier<fp8_rows, prefetch, num_producers, KVTile, dtype> copier;
        return copier.fill(part_of(params, shared.blocks), ring, group - groups);
    }
    take_registers<Share::consumer>();
    const auto part = part_of(params, shared.blocks);

    Softmax softmax{shared.softmax, group, warp_row, params.softmax_scale * log2_e};
    const int seen[2] = {part.seen(softmax.row(0)), part.seen(softmax.row(1))};
    part.tile.copy<QTile>(shared.q, params.q, params.q_stride, consumers);
    cp_async_commit();
    cp_async_wait<0>();
    fence_proxy_async();                 // before wgmma reads Q
    named_barrier_sync(both_groups, consumers);  // Q is there for both groups

    ByRows<QTile> q_operand;
    ByRows<KVTile> k_operand;
    ByColumns<KVTile> v_operand[sums];
    q_operand.start(shared.q);
    k_operand.start(ring.block[0]);
    each_sum([&](int i) { v_operand[i].start(ring.block[0] + KVTile::step(0, first_col(i))); });

    Accumulator<16, block_n> s;
    HeldA<16, block_n> p;
    Accumulator<16, sum_cols> o[sums];  // of this warp
    each_sum([&](int i) { o[i].clear(); });
    auto at = ring.consumer();

    // S = Q K^T of this group's block
    auto start_scores = [&](const Ring::State &at) {
        ring.wait(at);
        start_product<dtype, head_dim>(s, q_operand, k_operand.after(at.stage));
    };
    // Its P, for both groups. Returns by what O is yet to be multiplied.
    auto pass = [&](int first, const Ring::State &at) {
        keep_in_place(softmax.first);  // where its rows lie is worked out anew
        if constexpr (sparse)
            hide_rows(s, ring.rows_there(at));
        else if (first + block_n > min(seen[0], seen[1]))
            softmax.hide(s, first, seen);
        __syncwarp();  // every lane has read what the other group passed
        const float2 factor = softmax.take(s);
        softmax.store_p<PTile>(shared.p, 0, s);
        named_barrier_arrive(has_passed + group, consumers);  // P and m are there; no product reads K any more
        return factor;
    };
    auto start_sums = [&] {
        each_sum([&](int i) { start_sum<dtype, block_n>(o[i], p, v_operand[i].after(at.stage)); });
    };
    // O += P V of this group's block, and of the other one's
    auto start_own_sum = [&](float2 factor) {
        each_sum([&](int i) { softmax.scale(o[i], factor); });
        p = round_to_operand<dtype>(s);
        start_sums();
    };
    auto start_other_sum = [&] {
        named_barrier_sync(has_passed + (group ^ 1), consumers);
        const float2 factor = softmax.follow();
        each_sum([&](int i) { softmax.scale(o[i], factor); });
        QOperand<16, block_n, 0, HoistedReader<PTile, dtype>, 1> passed;
        passed.start(shared.p, softmax.first);
        p = passed;
        start_sums();
    };
    auto end_sum = [&] {
        each_sum([&](int i) { wait_for(o[i], p); });
        ring.release(at);
    };

    int first = part.begin;
    for (; first + block_n < part.end; first += 2 * block_n)
        if (group == 0) {
            start_scores(at);
            wait_for(s);
            start_own_sum(pass(first, at));
            end_sum();
            start_other_sum();
            end_sum();
        } else {
            auto next = at;
            next.advance();
            // With two stages the other block is done with before the next one has to be there: one of them is filled while
            // the groups multiply with the other.
            constexpr bool in_turn = Ring::stages == 2;
            if (in_turn) {
                start_other_sum();
                end_sum();
            }
            start_scores(next);
            wait_for(s);
            if (!in_turn) start_other_sum();
            const float2 factor = pass(first + block_n, next);
            if (!in_turn) end_sum();
            start_own_sum(factor);
            end_sum();
        }
    if (first < part.end) {  // a block without another one
        if (group == 0) {
            start_scores(at);
            wait_for(s);
            start_own_sum(pass(first, at));
        } else {
            start_other_sum();
        }
        end_sum();
    }
    softmax.offer_sum();
    named_barrier_sync(both_groups, consumers);  // the sums of all keys are there
    softmax.sum_up();
    const auto done = part_of(params, shared.blocks);  // read anew: registers are few in the loop
    each_sum([&](int i) {
        if (shared.blocks.count == 1)
            done.template store_whole<dtype>(softmax, o[i], first_col(i));
        else
            done.store(partials, softmax, o[i], first_col(i), head_dim_v);
    });
}

#include "sliced_combine.cuh"  // the second kernel
