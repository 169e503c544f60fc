// The gradients of a tile of keys by wgmma, with the same bits each run: the tiles of keys are added to a tile of dQ one after
// the other, in one order. Three kernels, each launched while the one before still runs:
//
//     backward_prepare      delta = rowsum(O dO), lse in log2, a counter of zero for each tile of dQ
//     attention_backward    a CTA has a tile of keys, and all rows of Q that see it pass by, from the last ones up
//     backward_finish       dQ, from fp32 sums as warps hold them to rows
//
// The roles of a CTA of attention_backward:
//
//     producers, two threads   have TMA load K, then Q with lse; and V, then dO with delta
//     adders, two threads      take tiles of dQ in turn: wait until the tiles of keys before have added theirs, and add
//     consumers, warpgroups    S^T = K Q^T and dP^T = V dO^T of a step of rows, dV += P^T dO, dK += dS^T Q; and dQ = dS K
//                              of a tile, which they leave in `dq`
//
// A product that is started runs on until it is waited for: S of the next step starts behind dP of this one. The barriers:
//
//     q, dout      full: TMA has brought the tile and its numbers. empty: no warp needs it. dS has places as dO has
//     keys_full    K and V have come
//     barrier 1    of all consumers: every warp has stored its dS of the tile, so that dQ may start
//     dq_full      of each adder: every warp has put its part of dQ there. dq_empty: the adder has read it
//     added        in global memory, of each tile of dQ: how many tiles of keys have been added
#include "dq_bulk.cuh"
#include "kept_bits.cuh"
#include "key_mask.cuh"
#include "key_operand.cuh"
#include "padded_pass.cuh"
#include "pipeline/roles.cuh"
#include "ptx/griddepcontrol.cuh"
#include "query_tile.cuh"
#include "row_pipeline.cuh"
#include "turns.cuh"
#include "warpgroup_tiles.cuh"

#include <type_traits>

using namespace config;

using Share = Registers<num_groups, 1, 24>;  // the producer's warpgroup is the last one

using Params = std::conditional_t<dropout, Dropping<BackwardParams>, BackwardParams>;

using DqSums = Accumulator<16, dq_cols>;  // of a warp, of a tile
constexpr int warp_sums = 16 * dq_cols;
// With dropout dV comes behind dS. With 128 columns registers then allow no S beside dS, and with 64 no wait for dV before dQ.
constexpr bool scores_ahead = !dropout || head_dim <= 64;
constexpr bool dv_is_late = dropout && scores_ahead;
constexpr int tile_sums = num_groups * 4 * warp_sums;
constexpr int last_row = block_m - step_rows;  // of a tile, where a step begins

struct CountedWorkspaces : PaddedWorkspaces {
    unsigned *added;  // to each tile of dQ: tiles of keys
};
FLASHLADDER_WORKSPACE(added, unsigned, "batch * num_heads * cdiv(seqlen_q, block_m)");

struct Maps { TensorMapBytes q, dout, k, v; };
struct Shared {
    dtype k[KTile::size], v[KTile::size];
    dtype ds[2][STile::size];
    RowPipeline<QTile, dtype, 3> q;  // of this tile, of the next one, and one that comes
    RowPipeline<QTile, dtype, 2> dout;
    float dq[num_groups * 4][warp_sums];  // of each warp, on its way
    Mbarrier dq_full[2];  // every warp has put its part there, for the one or the other warp that adds
    Mbarrier dq_empty;    // which has added it, or has let it be read
    Mbarrier keys_full;  // K and V have come
};

// A tile of dQ among those of all heads.
__device__ inline long long tile_of(const BackwardParams &p, int batch, int head, int number) {
    return padded_row(p, batch, head, number) / block_m;
}

// Adds every other tile of dQ that the CTA has, `mine` and those behind it, when it is the turn of its tile of keys.
__device__ inline void add_tiles(const BackwardParams &p, const CountedWorkspaces &workspaces, Shared &shared,
                                 const KeyTile<head_dim, true, 32> &of, QueryTilesFromTheEnd tiles, int mine) {
    wait_for_dependency();  // the counters are zero
    const int count = tiles.count();
#pragma unroll 1
    for (int i = 0; i < count; ++i, tiles.advance()) {
        if (i % 2 != mine) continue;
        const long long tile = tile_of(p, of.batch, tiles.head, tiles.number);
        float *sums = workspaces.dq_sum + tile * tile_sums;
        wait_until_added(workspaces.added + tile, of.number);
        shared.dq_full[mine].wait(i / 2 % 2);
        if (of.number == 0)
            bulk_store(sums, shared.dq[0], sizeof shared.dq);
        else
            bulk_add(sums, shared.dq[0], sizeof shared.dq);
        tma_store_commit();
        tma_store_wait_read();
        shared.dq_empty.arrive();
        tma_store_wait();
        add_release(workspaces.added + tile, 1);
    }
}

FLASHLADDER_KERNEL(backward_prepare, BackwardParams, Launch{pass_threads, 0, block_m});
extern "C" __global__ void __launch_bounds__(pass_threads)
    backward_prepare(const __grid_constant__ BackwardParams p, const __grid_constant__ CountedWorkspaces workspaces) {
    launch_dependents();
    prepare_tile<false>(BatchRows{p}, workspaces);  // who comes first to a tile of dQ stores it
    if (threadIdx.x == 0) workspaces.added[tile_of(p, blockIdx.z, blockIdx.y, blockIdx.x)] = 0;
}

FLASHLADDER_KERNEL(attention_backward, Params,
                   Launch{Share::num_threads, sizeof(Shared), block_m, block_n}
                       .over("cdiv(seqlen_k, block_n)", "num_heads_k", "batch")
                       .by_tma("q", block_m, 64, 128)
                       .by_tma("dout", block_m, 64, 128)
                       .by_tma("k", block_n, 64, 128)
                       .by_tma("v", block_n, 64, 128)
                       .dependent());
extern "C" __global__ void __launch_bounds__(Share::num_threads, 1)
    attention_backward(const __grid_constant__ Params p, const __grid_constant__ CountedWorkspaces workspaces,
                       const __grid_constant__ Maps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);

    launch_dependents();
    const KeyTile<head_dim, true, 32> tile{p};
    const KeyMask<causal> mask{p};
    const int batch = tile.batch, head_k = tile.head, group_heads = p.num_heads / p.num_heads_k;
    const int first_key = tile.number * block_n, end_key = min(block_n, p.seqlen_k - first_key);

    if (threadIdx.x == 0) {
        shared.q.init(num_groups * 4);
        shared.dout.init(num_groups * 4);
        for (Mbarrier &full : shared.dq_full) full.init(num_groups * 4);
        shared.dq_empty.init(1);
        shared.keys_full.init(2);
        fence_mbarrier_init();
    }
    __syncthreads();  // the barriers are made

    // The tiles of Q of all heads that share the keys, one head behind the other.
    QueryTilesFromTheEnd tiles{p, mask.first_row(first_key), head_k * group_heads, group_heads};
    const int count = tiles.count();

    if (warpgroup_index() == num_groups) {
        release_registers<Share::producer>();
        if (lane_index() != 0) return;
        const int role = warp_index() % 4;
        if (role < 2) return add_tiles(p, workspaces, shared, tile, tiles, role);

        // Starts loading the tiles of Q or dO, and their numbers.
        auto load_tiles = [&](auto &pipeline, const TensorMapBytes &map, const float *of_rows) {
            wait_for_dependency();  // lse and delta are there
            auto at = pipeline.producer();
#pragma unroll 1
            for (int i = 0; i < count; ++i, tiles.advance(), at.advance())
                pipeline.load(at, map, tiles.number * block_m, tiles.head, batch,
                              of_rows + padded_row(p, batch, tiles.head, tiles.number));
        };
        if (role == 2) {
            load_tile<KTile>(shared.k, maps.k, shared.keys_full, first_key, head_k, batch);
            load_tiles(shared.q, maps.q, workspaces.lse);
        } else {
            load_tile<KTile>(shared.v, maps.v, shared.keys_full, first_key, head_k, batch);
            load_tiles(shared.dout, maps.dout, workspaces.delta);
        }
        return;
    }
    take_registers<Share::consumer>();

    const int warp = uniform_warp_index(), warp_key = warp * 16;
    const DqPart part{warp / 4};
    KeyOperand keys, values;
    ByRows<QTile> q_rows, dout_rows;
    ByColumns<QTile> q_columns, dout_columns;
    ByColumns<STile> ds_columns;
    ByColumns<KTile> k_columns;
    q_rows.start(shared.q.tiles[0]);
    dout_rows.start(shared.dout.tiles[0]);
    q_columns.start(shared.q.tiles[0]);
    dout_columns.start(shared.dout.tiles[0]);
    ds_columns.start(shared.ds[0], part.row);
    k_columns.start(shared.k, part.col);
    HoistedReader<STile, dtype> ds_place;
    ds_place.start(shared.ds[0], warp_key);

    const float unit = p.softmax_scale * log2_e;
    const Dropout<dropout> dropping{p, batch, 0};
    Accumulator<16, head_dim> dv, dk;  // of this warp
    dv.clear();
    dk.clear();

    auto q_at = shared.q.consumer();
    auto dout_at = shared.dout.consumer();  // dS is at the same place

    Scores s;
    ScoresOperand p_rounded;
    KeptBits kept;
    DqSums dq;

    // S^T = K Q^T of a step
    auto start_scores = [&](int row) {
        if (row == 0) shared.q.wait(q_at);
        start_product<dtype, head_dim>(s, keys, q_rows.after(q_at.stage).below(row));
    };
    // Which weights of the step are kept, while its dP is under way
    auto draw = [&](int row) {
        if constexpr (dropout)
            kept.draw(Dropout<true>{p, batch, tiles.head}, tiles.number * block_m + row, first_key + warp_key);
    };
    // dV += P^T dO
    auto start_dv = [&](int row) {
        start_sum<dtype, step_rows>(dv, p_rounded, dout_columns.after(dout_at.stage).below(row));
    };
    // P^T of the step whose S is there, and dV; with dropout later, as dS needs all of P
    auto start_step = [&](int row) {
        mask.hide(s, first_key + warp_key, tiles.number * block_m + row);
        probabilities(s, unit, shared.q.numbers[q_at.stage] + row);
        p_rounded = round_to_operand<dtype>(s);
        if (row == 0) shared.dout.wait(dout_at);
        if constexpr (!dropout) start_dv(row);
    };
    // dP^T = V dO^T and dS of the same step, and dK += dS^T Q. `start_next` starts S of the next step behind dP.
    auto start_dk = [&](int row, auto start_next, auto has_next) {
        const int q_stage = q_at.stage;
        Scores dp;
        start_product<dtype, head_dim>(dp, values, dout_rows.after(dout_at.stage).below(row));
        if constexpr (scores_ahead) start_next();
        draw(row);
        wait_for<(scores_ahead && decltype(has_next)::value)>(dp);
        stay_here(dv);
        stay_here(p_rounded);
        if constexpr (dropout) kept.drop(dp);
        score_gradients<dtype>(dp, p_rounded, shared.dout.numbers[dout_at.stage] + row, dropout ? dropping.rescale : 1.0f);
        auto ds = round_to_operand<dtype>(dp);
        if constexpr (dropout) {
            p_rounded = kept.of(p_rounded);
            start_dv(row);
        }
        store_scores(ds_place, dout_at.stage, row, ds);
        start_sum<dtype, step_rows>(dk, ds, q_columns.after(q_stage).below(row));
        if constexpr (!scores_ahead) start_next();
    };
    // dQ = dS K of the tile, when all warps have stored dS
    auto start_dq = [&] {
        fence_proxy_async();
        if constexpr (!scores_ahead) {  // dQ takes the registers of dV's operand
            wait_for<1>(dv);
            stay_here(p_rounded);
        }
        named_barrier_sync(1, num_groups * warpgroup_threads);
        if constexpr (!dv_is_late) shared.dout.release(dout_at.stage);
        start_product<dtype, block_n>(dq, ds_columns.after(dout_at.stage), k_columns);
    };

    // dQ of a tile, whose dS was at `stage`, for the warp that adds it
    auto give_dq = [&](int stage) {
        shared.dq_empty.wait(stage ^ 1);
        stage_sums(shared.dq[warp], dq);
        shared.dq_full[stage].arrive_as_warp();
    };

    shared.keys_full.wait(0);
    start_operand(keys, shared.k, warp_key);
    start_operand(values, shared.v, warp_key);
    start_scores(0);
    wait_for(s);
    start_step(0);
    for (int left = count;; --left) {
        // All steps of a tile but its last one
#pragma unroll
        for (int row = 0; row < block_m - step_rows; row += step_rows) {
            start_dk(row, [&] { start_scores(row + step_rows); }, std::true_type{});
            wait_for<1>(s);
            start_step(row + step_rows);
        }
        if (left == 1) break;
        const int q_ended = q_at.stage;
        start_dk(last_row, [&] { q_at.advance(); start_scores(0); }, std::true_type{});
        start_dq();
        tiles.advance();
        dout_at.advance();
        wait_for<(head_dim > 64 ? 1 : 2)>(s);  // with 128 columns, registers allow no dK beside P
        if constexpr (dv_is_late) shared.dout.release(dout_at.stage ^ 1);
        start_step(0);
        wait_for<!dropout>(dq);
        shared.q.release(q_ended);
        give_dq(dout_at.stage ^ 1);
    }
    start_dk(last_row, [] {}, std::false_type{});
    start_dq();
    wait_for(dk);
    if constexpr (dropout) stay_here(dv);
    wait_for(dq);
    give_dq(dout_at.stage);

    named_barrier_sync(1, num_groups * warpgroup_threads);  // every warp has read K
    scale(dk, p.softmax_scale);
    if constexpr (dropout) scale(dv, dropping.rescale);
    store_keys(shared.v, warp_key, head_of(p.dv, p.dv_stride, batch, head_k), p.dv_stride.row, first_key, end_key, dv);
    store_keys(shared.k, warp_key, head_of(p.dk, p.dk_stride, batch, head_k), p.dk_stride.row, first_key, end_key, dk);
}

FLASHLADDER_KERNEL(backward_finish, BackwardParams, Launch{finish_threads, QTile::size * sizeof(dtype), block_m}.dependent());
extern "C" __global__ void __launch_bounds__(finish_threads)
    backward_finish(const __grid_constant__ BackwardParams p, const __grid_constant__ CountedWorkspaces workspaces) {
    extern __shared__ __align__(128) char shared[];
    const long long tile = tile_of(p, blockIdx.z, blockIdx.y, blockIdx.x);
    float *sums = workspaces.dq_sum + tile * tile_sums + warp_index() * warp_sums;
    const bool has_keys = KeyMask<causal>{p}.end_key(blockIdx.x * block_m + block_m - 1) > 0;
    wait_for_dependency();  // the sums are complete
    finish_tile(p, has_keys ? load_sums<dq_cols>(sums) : DqSums{}, reinterpret_cast<dtype *>(shared));
}
