// Rows of the cache that lie anywhere, in 8 or in 16 bits: a warpgroup reads them, and writes them as 16-bit numbers where
// wgmma reads. A sequence's rows are those of its pages, or those of a list. The roles of a CTA:
//
//     producer, a warpgroup   reads rows a block ahead, widens them, and writes them into the ring
//     groups 0 and 1          S of every other block each, and its P for both; O += P V of half of the columns each
//
//     group 0    S(0)   softmax(0)    O += P(0) V(0)                 O += P(1) V(1)   S(2) ...
//     group 1           S(1)          O += P(0) V(0)   softmax(1)    O += P(1) V(1)          S(3) ...
//
// The barriers:
//
//     ring           full: the producer's warps have written their rows of a block. empty: both groups have read it
//     both_groups    Q is there for both groups; and at the end, the sums of all keys are
//     has_passed     of a group: its P and m are there for the other one
#include "combine_in_time.cuh"
#include "config.cuh"
#include "decode/cuda/equal_parts.cuh"
#include "passed_softmax.cuh"
#include "pipeline/roles.cuh"
#include "row_reader.cuh"

using namespace config;

constexpr int groups = 2;
constexpr int consumers = groups * warpgroup_threads;  // then comes the producer's group
constexpr int rows = warpgroup_rows;
constexpr int group_cols = head_dim_v / groups;  // of O
constexpr bool one_wave = true;  // an SM has room for one CTA: one part more than SMs would take as long again

using QTile = SwizzledPanels<rows, head_dim>;
using KVTile = SwizzledPanels<block_n, head_dim>;
using PTile = SwizzledPanels<rows, block_n>;
using Softmax = PassedSoftmax<rows>;
using Share = Registers<groups, 1, 88>;
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

extern "C" __global__ void __launch_bounds__(Share::num_threads, 1)
    attention_mla(const __grid_constant__ RowParams params, const __grid_constant__ Partials partials) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    auto &ring = shared.ring;
    const int group = uniform_warp_index() / 4, warp_row = warp_index() % 4 * 16;

    const Part found = find_part<block_n, one_wave>(params, blockIdx.y / params.num_heads_k);
    if (found.sequence < 0) return;  // there are fewer parts
    launch_where_room(params, found);
    if (threadIdx.x == 0) {
        shared.blocks = found;
        ring.init(consumers / 32);
    }
    __syncthreads();  // the barriers are made
    if (group == groups) {
        release_registers<Share::producer>();
        return RowReader<fp8_rows, KVTile, dtype>{}.read_all(part_of(params, shared.blocks), ring);
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
    ByColumns<KVTile> v_operand;
    q_operand.start(shared.q);
    k_operand.start(ring.block[0]);
    v_operand.start(ring.block[0] + KVTile::step(0, group * group_cols));

    Accumulator<16, block_n> s;
    HeldA<16, block_n> p;
    Accumulator<16, group_cols> o;  // of this warp
    o.clear();
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
    // O += P V of this group's block, and of the other one's
    auto start_own_sum = [&](float2 factor) {
        softmax.scale(o, factor);
        p = round_to_operand<dtype>(s);
        start_sum<dtype, block_n>(o, p, v_operand.after(at.stage));
    };
    auto start_other_sum = [&] {
        named_barrier_sync(has_passed + (group ^ 1), consumers);
        softmax.scale(o, softmax.follow());
        QOperand<16, block_n, 0, HoistedReader<PTile, dtype>, 1> passed;
        passed.start(shared.p, softmax.first);
        p = passed;
        start_sum<dtype, block_n>(o, p, v_operand.after(at.stage));
    };
    auto end_sum = [&] {
        wait_for(o, p);
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
            start_scores(next);
            wait_for(s);
            start_other_sum();
            const float2 factor = pass(first + block_n, next);
            end_sum();
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
    if (shared.blocks.count == 1)
        done.template store_whole<dtype>(softmax, o, group * group_cols);
    else
        done.store(partials, softmax, o, group * group_cols, head_dim_v);
}

#include "sliced_combine.cuh"  // the second kernel
