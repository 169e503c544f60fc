// Rung 02 whose blocks come by TMA, 64 columns at a time: products begin when the first columns are there.
//
//     producer     one warp: where the boxes of a block are, and a copy for each box and panel, when a stage is empty
//     two groups   the rest, as in rung 02
#include "config.cuh"
#include "latent_ring.cuh"
#include "pipeline/roles.cuh"

using namespace config;

constexpr int groups = 2;
constexpr int consumers = groups * warpgroup_threads;  // then comes the producer's group
constexpr int rows = warpgroup_rows;
constexpr int group_keys = block_n / groups;     // of S
constexpr int group_cols = head_dim_v / groups;  // of O

using QTile = SwizzledPanels<rows, head_dim>;
using KVTile = SwizzledPanels<block_n, head_dim>;
using PTile = SwizzledPanels<rows, block_n>;
using Softmax = SharedSoftmax<groups, rows>;
using Share = Registers<groups, 1>;

struct Shared {
    LatentRing<KVTile, dtype, 2> ring;
    alignas(1024) dtype q[QTile::size];
    dtype p[PTile::size];
    Softmax::Shared softmax;
};

FLASHLADDER_KERNEL(attention_mla, CacheParams,
                   Launch{Share::num_threads, sizeof(Shared), rows, block_n}
                       .over("cdiv(num_heads * seqlen_q, 64 * num_heads_k)", "num_heads_k * num_splits", "batch")
                       .by_tma("k_cache", rows_of_box<block_n>(), 64, 128));

extern "C" __global__ void __launch_bounds__(Share::num_threads, 1)
    attention_mla(const __grid_constant__ CacheParams params, const __grid_constant__ Partials partials,
                  const __grid_constant__ CacheMap map) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    auto &ring = shared.ring;
    const int group = warpgroup_index(), warp_row = warp_index() % 4 * 16;

    const LatentPart<rows, block_n, causal> part{params};
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
    named_barrier_sync(1, consumers);  // Q is there for both groups

    ByRows<QTile> q_operand;
    ByRows<KVTile> k_operand;
    ByColumns<KVTile> v_operand;
    q_operand.start(shared.q);
    k_operand.start(ring.block[0] + KVTile::step(group * group_keys, 0));
    v_operand.start(ring.block[0] + KVTile::step(0, group * group_cols));

    Accumulator<16, group_cols> o;  // of this warp
    o.clear();
    auto at = ring.consumer();
    for (int first = part.begin; first < part.end; first += block_n) {
        const int first_key = first + group * group_keys, left = part.end - first;
        Accumulator<16, group_keys> s;
#pragma unroll
        for (int panel = 0; panel < KVTile::panels; ++panel) {
            ring.wait(at, panel);
            start_product<dtype, 64>(s, panel_of(q_operand, panel), panel_of(k_operand.after(at.stage), panel), panel > 0);
        }
        wait_for(s);
        if (first_key + group_keys > min(seen[0], seen[1])) softmax.hide(s, first_key, seen);
        softmax.offer_maximum(s);
        named_barrier_sync(1, consumers);  // the maxima of both groups are there, and no product reads K any more
        softmax.update(s, o);
        softmax.store_p<PTile>(shared.p, group * group_keys, s);
        if (left < block_n) {
            const int warp_keys = warp_index() * 8;
            clear_rows_by_warp<KVTile>(ring.block[at.stage], max(left, warp_keys), warp_keys + 8);
            fence_proxy_async();  // before wgmma reads zeros in V
        }
        named_barrier_sync(1, consumers);  // P is there for both groups

        QOperand<16, block_n, 0, HoistedReader<PTile, dtype>, 1> p;  // all keys of the warp's rows
        p.start(shared.p, warp_row);
        start_sum<dtype, block_n>(o, p, v_operand.after(at.stage));
        wait_for(o);
        ring.release(at, group);
    }
    softmax.offer_sum();
    named_barrier_sync(1, consumers);  // the sums of all keys are there
    softmax.sum_up();
    part.store(partials, softmax, o, group * group_cols, head_dim_v);
}

FLASHLADDER_KERNEL(combine, SplitParams, Launch{32}.over("seqlen_q", "num_heads", "batch"));

extern "C" __global__ void __launch_bounds__(32)
    combine(const __grid_constant__ SplitParams params, const __grid_constant__ Partials partials) {
    combine_parts<head_dim_v>(params, partials, params.parts_of(blockIdx.z), blockIdx.z, blockIdx.y, blockIdx.x, 0,
                              lse_of_no_key);
}
