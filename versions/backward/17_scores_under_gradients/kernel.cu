// Rung 16 with S started one product earlier still, before dS of the step before is computed: no ordinary code is left
// without products beside it.
#include "dq_bulk.cuh"
#include "key_mask.cuh"
#include "key_operand.cuh"
#include "padded_pass.cuh"
#include "pipeline/roles.cuh"
#include "query_tile.cuh"
#include "row_pipeline.cuh"
#include "warpgroup_tiles.cuh"

#include <type_traits>

using namespace config;

using Share = Registers<num_groups, 1, 24>;  // the producer's warpgroup is the last one

using DqSums = Accumulator<16, dq_cols>;  // of a warp, of a tile
constexpr int warp_sums = 16 * dq_cols;
constexpr int last_row = block_m - step_rows;  // of a tile, where a step begins

// The sums of this warp in a tile of dQ.
__device__ inline float *sums_of_warp(float *dq_sum, long long padded_row) {
    return dq_sum + padded_row * head_dim + warp_index() * warp_sums;
}

struct Maps { TensorMapBytes q, dout, k, v; };
struct Shared {
    dtype k[KTile::size], v[KTile::size];
    dtype ds[2][STile::size];
    RowPipeline<QTile, dtype, 3> q;  // of this tile, of the next one, and one that comes
    RowPipeline<QTile, dtype, 2> dout;
    float dq[num_groups * 4][warp_sums];  // of each warp, on its way
    Mbarrier keys_full;  // K and V have come
};

FLASHLADDER_KERNEL(backward_prepare, BackwardParams, Launch{pass_threads, 0, block_m});
extern "C" __global__ void __launch_bounds__(pass_threads)
    backward_prepare(const __grid_constant__ BackwardParams p, const __grid_constant__ PaddedWorkspaces workspaces) {
    prepare_tile(p, workspaces);
}

FLASHLADDER_KERNEL(attention_backward, BackwardParams,
                   Launch{Share::num_threads, sizeof(Shared), block_m, block_n}
                       .over("cdiv(seqlen_k, block_n)", "num_heads_k", "batch")
                       .by_tma("q", block_m, 64, 128)
                       .by_tma("dout", block_m, 64, 128)
                       .by_tma("k", block_n, 64, 128)
                       .by_tma("v", block_n, 64, 128));
extern "C" __global__ void __launch_bounds__(Share::num_threads, 1)
    attention_backward(const __grid_constant__ BackwardParams p, const __grid_constant__ PaddedWorkspaces workspaces,
                       const __grid_constant__ Maps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);

    const KeyTile<head_dim, causal> tile{p};
    const KeyMask<causal> mask{p};
    const int batch = tile.batch, head_k = tile.head, group_heads = p.num_heads / p.num_heads_k;
    const int first_key = tile.number * block_n, end_key = min(block_n, p.seqlen_k - first_key);

    if (threadIdx.x == 0) {
        shared.q.init(num_groups * 4);
        shared.dout.init(num_groups * 4);
        shared.keys_full.init(2);
        fence_mbarrier_init();
    }
    __syncthreads();  // the barriers are made

    // The tiles of Q of all heads that share the keys, one head behind the other.
    QueryTiles tiles{p, mask.first_row(first_key), head_k * group_heads, group_heads};
    const int count = tiles.count();

    if (warpgroup_index() == num_groups) {
        release_registers<Share::producer>();
        if (threadIdx.x % warpgroup_threads != 0) return;
        load_tile<KTile>(shared.k, maps.k, shared.keys_full, first_key, head_k, batch);
        load_tile<KTile>(shared.v, maps.v, shared.keys_full, first_key, head_k, batch);
        auto q_at = shared.q.producer();
        auto dout_at = shared.dout.producer();
#pragma unroll 1
        for (int i = 0; i < count; ++i, tiles.advance(), q_at.advance(), dout_at.advance()) {
            const int row = tiles.number * block_m;
            const long long padded = padded_row(p, batch, tiles.head, tiles.number);
            shared.q.load(q_at, maps.q, row, tiles.head, batch, workspaces.lse + padded);
            shared.dout.load(dout_at, maps.dout, row, tiles.head, batch, workspaces.delta + padded);
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
    Accumulator<16, head_dim> dv, dk;  // of this warp
    dv.clear();
    dk.clear();

    auto q_at = shared.q.consumer();
    auto dout_at = shared.dout.consumer();  // dS is at the same place

    Scores s;
    ScoresOperand p_rounded;
    DqSums dq;

    // S^T = K Q^T of a step
    auto start_scores = [&](int row) {
        if (row == 0) shared.q.wait(q_at);
        start_product<dtype, head_dim>(s, keys, q_rows.after(q_at.stage).below(row));
    };
    // P^T of the step whose S is there, and dV += P^T dO
    auto start_dv = [&](int row) {
        mask.hide(s, first_key + warp_key, tiles.number * block_m + row);
        probabilities(s, unit, shared.q.numbers[q_at.stage] + row);
        p_rounded = round_to_operand<dtype>(s);
        if (row == 0) shared.dout.wait(dout_at);
        start_sum<dtype, step_rows>(dv, p_rounded, dout_columns.after(dout_at.stage).below(row));
    };
    // dP^T = V dO^T and dS of the same step, and dK += dS^T Q. `start_next` starts S of the next step behind dP.
    auto start_dk = [&](int row, auto start_next, auto has_next) {
        const int q_stage = q_at.stage;
        Scores dp;
        start_product<dtype, head_dim>(dp, values, dout_rows.after(dout_at.stage).below(row));
        start_next();
        wait_for<decltype(has_next)::value>(dp);
        stay_here(dv);
        stay_here(p_rounded);
        score_gradients<dtype>(dp, p_rounded, shared.dout.numbers[dout_at.stage] + row);
        auto ds = round_to_operand<dtype>(dp);
        store_scores(ds_place, dout_at.stage, row, ds);
        start_sum<dtype, step_rows>(dk, ds, q_columns.after(q_stage).below(row));
    };
    // dQ = dS K of the tile, when all warps have stored dS
    auto start_dq = [&] {
        fence_proxy_async();
        named_barrier_sync(1, num_groups * warpgroup_threads);
        shared.dout.release(dout_at.stage);
        start_product<dtype, block_n>(dq, ds_columns.after(dout_at.stage), k_columns);
    };

    auto add_dq = [&](const QueryTiles &of) {
        const long long row = padded_row(p, batch, of.head, of.number);
        start_adding(sums_of_warp(workspaces.dq_sum, row), shared.dq[warp], dq);
    };

    shared.keys_full.wait(0);
    start_operand(keys, shared.k, warp_key);
    start_operand(values, shared.v, warp_key);
    start_scores(0);
    wait_for(s);
    start_dv(0);
    for (int left = count;; --left) {
        // All steps of a tile but its last one
#pragma unroll
        for (int row = 0; row < block_m - step_rows; row += step_rows) {
            start_dk(row, [&] { start_scores(row + step_rows); }, std::true_type{});
            wait_for<1>(s);
            start_dv(row + step_rows);
        }
        if (left == 1) break;
        const QueryTiles ended = tiles;
        const int q_ended = q_at.stage;
        start_dk(last_row, [&] { q_at.advance(); start_scores(0); }, std::true_type{});
        start_dq();
        tiles.advance();
        dout_at.advance();
        wait_for<(head_dim > 64 ? 1 : 2)>(s);  // with 128 columns, registers allow no dK beside P
        start_dv(0);
        wait_for<1>(dq);
        shared.q.release(q_ended);
        add_dq(ended);
    }
    start_dk(last_row, [] {}, std::false_type{});
    start_dq();
    wait_for(dk);
    wait_for(dq);
    add_dq(tiles);

    named_barrier_sync(1, num_groups * warpgroup_threads);  // every warp has read K
    scale(dk, p.softmax_scale);
    store_keys(shared.v, warp_key, head_of(p.dv, p.dv_stride, batch, head_k), p.dv_stride.row, first_key, end_key, dv);
    store_keys(shared.k, warp_key, head_of(p.dk, p.dk_stride, batch, head_k), p.dk_stride.row, first_key, end_key, dk);
    wait_for_stores();  // shared memory is read for as long
}

FLASHLADDER_KERNEL(backward_finish, BackwardParams, Launch{finish_threads, QTile::size * sizeof(dtype), block_m});
extern "C" __global__ void __launch_bounds__(finish_threads)
    backward_finish(const __grid_constant__ BackwardParams p, const __grid_constant__ PaddedWorkspaces workspaces) {
    extern __shared__ __align__(128) char shared[];
    float *sums = sums_of_warp(workspaces.dq_sum, padded_row(p, blockIdx.z, blockIdx.y, blockIdx.x));
    finish_tile(p, load_sums<dq_cols>(sums), reinterpret_cast<dtype *>(shared));
}
