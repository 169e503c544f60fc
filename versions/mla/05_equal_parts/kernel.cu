// DeepSeek's latents, of which each row is K and V of all heads, for sequences of any lengths: all parts have about as many
// keys, and there is one for each SM. A sequence that is one part needs no other kernel. The parts of others are combined by a
// kernel that is launched while this one runs. The roles of a CTA:
//
//     producer, a warp    has TMA load blocks of keys into the ring, 64 columns at a time
//     groups 0 and 1      S of every other block each, and its P for both; O += P V of half of the columns each
//
//     group 0    S(0)   softmax(0)    O += P(0) V(0)                 O += P(1) V(1)   S(2) ...
//     group 1           S(1)          O += P(0) V(0)   softmax(1)    O += P(1) V(1)          S(3) ...
//
// The barriers:
//
//     ring           full, of each 64 columns: TMA has brought them. empty, of each half of V: its group has read it
//     both_groups    Q is there for both groups; and at the end, the sums of all keys are
//     has_passed     of a group: its P and m are there for the other one
//     has_cleared    of a group: in V, the rows behind the last key are zero
#include "combine_in_time.cuh"
#include "config.cuh"
#include "decode/cuda/parts_of_sequence.cuh"
#include "latent_scores.cuh"
#include "passed_softmax.cuh"
#include "pipeline/roles.cuh"

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
using Share = Registers<groups, 1>;
using Ring = LatentRing<KVTile, dtype, head_dim <= 192 ? 6 : 2>;

constexpr int both_groups = 1, has_passed = 2, has_cleared = has_passed + groups;  // the last two: for each group

struct Shared {
    Ring ring;
    alignas(1024) dtype q[QTile::size];
    dtype p[PTile::size];
    Softmax::Shared softmax;
};

FLASHLADDER_KERNEL(attention_mla, CacheParams,
                   Launch{Share::num_threads, sizeof(Shared), rows, block_n}
                       .over("cdiv(num_heads * seqlen_q, 64 * num_heads_k)", "num_heads_k * num_parts", "1")
                       .by_tma("k_cache", rows_of_box<block_n>(), 64, 128));

extern "C" __global__ void __launch_bounds__(Share::num_threads, 1)
    attention_mla(const __grid_constant__ CacheParams params, const __grid_constant__ Partials partials,
                  const __grid_constant__ CacheMap map) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    auto &ring = shared.ring;
    const int group = uniform_warp_index() / 4, warp_row = warp_index() % 4 * 16;

    const int head_k = blockIdx.y % params.num_heads_k, number = blockIdx.y / params.num_heads_k;
    const Part blocks = find_part<block_n, one_wave>(params, number);
    if (blocks.sequence < 0) return;  // there are fewer parts
    launch_where_room(params, blocks);
    const LatentPart<rows, block_n, causal> part{params, blocks.sequence, head_k, number, blocks.first_block(0),
                                                 blocks.first_block(1)};
    if (threadIdx.x == 0) {
        ring.init();
        fence_mbarrier_init();
    }
    __syncthreads();  // the barriers are made
    if (group == groups) {
        release_registers<Share::producer>();
        if (warp_index() == consumers / 32) ring.load_all(part, map);
        return;
    }
    take_registers<Share::consumer>();

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
    auto start_scores = [&](const Ring::State &at) { ::start_scores<dtype>(s, q_operand, k_operand, ring, at); };
    // Its P, for both groups. Returns by what O is yet to be multiplied.
    auto pass = [&](int first, const Ring::State &at) {
        if (first + block_n > min(seen[0], seen[1])) softmax.hide(s, first, seen);
        __syncwarp();  // every lane has read what the other group passed
        const float2 factor = softmax.take(s);
        softmax.store_p<PTile>(shared.p, 0, s);
        if (first + block_n > part.end) {
            clear_rows_by_warp<KVTile>(ring.block[at.stage], max(part.end - first, warp_row), warp_row + 16);
            fence_proxy_async();  // before wgmma reads zeros in V
            named_barrier_sync(has_cleared + group, warpgroup_threads);
        }
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
        passed.start(shared.p, warp_row);
        p = passed;
        start_sum<dtype, block_n>(o, p, v_operand.after(at.stage));
    };
    auto end_sum = [&] {
        wait_for(o, p);
        ring.release(at, group);
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
    if (blocks.count == 1)
        part.store_whole<dtype>(softmax, o, group * group_cols);
    else
        part.store(partials, softmax, o, group * group_cols, head_dim_v);
}

// A warp combines 64 columns of a row. The warps of all CTAs share out what there is of sequences that are cut, as many
// CTAs as run at once: where no sequence is cut, they are gone soon.
constexpr int combine_warps = 4, combine_ctas = 8;  // of an SM
constexpr int slice = 64, slices = head_dim_v / slice;
FLASHLADDER_KERNEL(combine, SplitParams,
                   Launch{combine_warps * 32}.over("min(2 * batch * seqlen_q * num_heads, 8 * 132)", "1", "1").dependent());

extern "C" __global__ void __launch_bounds__(combine_warps * 32, combine_ctas)
    combine(const __grid_constant__ SplitParams params, const __grid_constant__ Partials partials) {
    const int rows_of_one = params.seqlen_q * params.num_heads;
    int item = blockIdx.x * combine_warps + uniform_warp_index();  // of a sequence's; behind its last one come the next one's
    each_cut_sequence<block_n, one_wave>(params, [&](int sequence, Parts parts) {
        wait_for_dependency();  // the parts are there
        for (; item < rows_of_one * slices; item += gridDim.x * combine_warps) {
            const int row = item / slices;
            combine_parts<head_dim_v, slice>(params, partials, parts, sequence, row % params.num_heads,
                                             row / params.num_heads, item % slices * slice, lse_of_no_key);
        }
        item -= rows_of_one * slices;
    });
    wait_for_dependency();  // when this kernel has ended, so has the other one
}
