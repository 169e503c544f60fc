// DeepSeek's latents, of which each row is K and V of all heads: the CTAs that have parts of the same rows are a cluster, and
// combine them over its shared memory. The roles of a CTA:
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
//     cluster_sync   all CTAs' parts are there; then: all have been read
#include "config.cuh"
#include "decode/cuda/cluster_parts.cuh"
#include "latent_scores.cuh"
#include "passed_softmax.cuh"
#include "pipeline/roles.cuh"

using namespace config;

constexpr int groups = 2;
constexpr int consumers = groups * warpgroup_threads;  // then comes the producer's group
constexpr int rows = warpgroup_rows;
constexpr int group_cols = head_dim_v / groups;  // of O

using QTile = SwizzledPanels<rows, head_dim>;
using KVTile = SwizzledPanels<block_n, head_dim>;
using PTile = SwizzledPanels<rows, block_n>;
using Softmax = PassedSoftmax<rows>;
using Share = Registers<groups, 1>;
using Ring = LatentRing<KVTile, dtype, head_dim <= 192 ? 6 : 2>;

using CtaPart = PartOfRows<rows, head_dim_v, 8>;
static_assert(sizeof(CtaPart) <= sizeof(Ring::block), "it takes the place of blocks");

constexpr int both_groups = 1, has_passed = 2, has_cleared = has_passed + groups;  // the last two: for each group

struct Shared {
    Ring ring;
    alignas(1024) dtype q[QTile::size];
    dtype p[PTile::size];
    Softmax::Shared softmax;
};

FLASHLADDER_KERNEL(attention_mla, CacheParams,
                   Launch{Share::num_threads, sizeof(Shared), rows, block_n}
                       .over("cdiv(num_heads * seqlen_q, 64 * num_heads_k)", "num_heads_k * cluster_size", "batch")
                       .clusters(1, cluster_size)
                       .by_tma("k_cache", rows_of_box<block_n>(), 64, 128));

extern "C" __global__ void __launch_bounds__(Share::num_threads, 1)
    attention_mla(const __grid_constant__ CacheParams params, const __grid_constant__ Partials,
                  const __grid_constant__ CacheMap map) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    auto &ring = shared.ring;
    const int group = uniform_warp_index() / 4, warp_row = warp_index() % 4 * 16;

    const int sequence = blockIdx.z, split = cluster_rank();
    const int blocks = (params.keys_of(sequence) + block_n - 1) / block_n;
    const LatentPart<rows, block_n, causal> part{params, sequence, int(blockIdx.y) / cluster_size, split,
                                                 blocks * split / cluster_size, blocks * (split + 1) / cluster_size};
    if (threadIdx.x == 0) {
        ring.init();
        fence_mbarrier_init();
    }
    __syncthreads();  // the barriers are made
    if (group == groups) {
        release_registers<Share::producer>();
        if (warp_index() == consumers / 32) ring.load_all(part, map);
        cluster_sync();
        return cluster_sync();
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
    q_operand.start(without_rank(shared.q));
    k_operand.start(without_rank(ring.block[0]));
    v_operand.start(without_rank(ring.block[0]) + KVTile::step(0, group * group_cols));

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
    auto &of_cta = *reinterpret_cast<CtaPart *>(ring.block);  // no product reads them any more
    part.put(of_cta, softmax, o, group * group_cols);

    cluster_sync();  // the parts are there
    combine_cluster<cluster_size>(params, part.tile, of_cta, consumers, lse_of_no_key);
    cluster_sync();  // every CTA's part is there until it has been read
}
