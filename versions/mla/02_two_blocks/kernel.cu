// Rung 01 with room for two blocks: while one is multiplied with, the next one is on its way.
#include "config.cuh"
#include "latents.cuh"
#include "tile/warpgroup_gemm.cuh"

using namespace config;

constexpr int groups = 2;
constexpr int num_threads = groups * warpgroup_threads;
constexpr int rows = warpgroup_rows;
constexpr int group_keys = block_n / groups;     // of S
constexpr int group_cols = head_dim_v / groups;  // of O

using QTile = SwizzledPanels<rows, head_dim>;
using KVTile = SwizzledPanels<block_n, head_dim>;
using PTile = SwizzledPanels<rows, block_n>;
using Softmax = SharedSoftmax<groups, rows>;

struct Shared {
    dtype q[QTile::size];
    dtype kv[2][KVTile::size];
    dtype p[PTile::size];
    Softmax::Shared softmax;
};

FLASHLADDER_KERNEL(attention_mla, CacheParams,
                   Launch{num_threads, sizeof(Shared), rows, block_n}
                       .over("cdiv(num_heads * seqlen_q, 64 * num_heads_k)", "num_heads_k * num_splits", "batch"));

extern "C" __global__ void __launch_bounds__(num_threads, 1)
    attention_mla(const __grid_constant__ CacheParams params, const __grid_constant__ Partials partials) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    const int group = warpgroup_index(), warp_row = warp_index() % 4 * 16;

    const LatentPart<rows, block_n, causal> part{params};
    Softmax softmax{shared.softmax, group, warp_row, params.softmax_scale * log2_e};
    const int seen[2] = {part.seen(softmax.row(0)), part.seen(softmax.row(1))};
    part.tile.copy<QTile>(shared.q, params.q, params.q_stride);

    ByRows<QTile> q_operand;
    ByRows<KVTile> k_operand;
    ByColumns<KVTile> v_operand;
    q_operand.start(shared.q);
    k_operand.start(shared.kv[0] + KVTile::step(group * group_keys, 0));
    v_operand.start(shared.kv[0] + KVTile::step(0, group * group_cols));

    Accumulator<16, group_cols> o;  // of this warp
    o.clear();
    part.copy<KVTile>(shared.kv[0], part.begin);
    cp_async_commit();
    for (int first = part.begin, here = 0; first < part.end; first += block_n, here ^= 1) {
        if (first + block_n < part.end) part.copy<KVTile>(shared.kv[here ^ 1], first + block_n);
        cp_async_commit();  // a group a block, also an empty one, so that they can be counted
        cp_async_wait<1>();
        fence_proxy_async();
        __syncthreads();  // the block is there for the products of every group, and Q

        const int first_key = first + group * group_keys;
        Accumulator<16, group_keys> s;
        start_product<dtype, head_dim>(s, q_operand, k_operand.after(here));
        wait_for(s);
        if (first_key + group_keys > min(seen[0], seen[1])) softmax.hide(s, first_key, seen);
        softmax.offer_maximum(s);
        __syncthreads();  // the maxima of both groups are there
        softmax.update(s, o);
        softmax.store_p<PTile>(shared.p, group * group_keys, s);
        __syncthreads();  // P is there for both groups

        QOperand<16, block_n, 0, HoistedReader<PTile, dtype>, 1> p;  // all keys of the warp's rows
        p.start(shared.p, warp_row);
        start_sum<dtype, block_n>(o, p, v_operand.after(here));
        wait_for(o);
        __syncthreads();  // no group needs the block and P any more
    }
    softmax.offer_sum();
    __syncthreads();  // the sums of all keys are there
    softmax.sum_up();
    part.store(partials, softmax, o, group * group_cols, head_dim_v);
}

FLASHLADDER_KERNEL(combine, SplitParams, Launch{32}.over("seqlen_q", "num_heads", "batch"));

extern "C" __global__ void __launch_bounds__(32)
    combine(const __grid_constant__ SplitParams params, const __grid_constant__ Partials partials) {
    combine_parts<head_dim_v>(params, partials, params.parts_of(blockIdx.z), blockIdx.z, blockIdx.y, blockIdx.x, 0,
                              lse_of_no_key);
}
