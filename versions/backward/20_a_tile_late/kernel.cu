// The gradients of a tile of keys by wgmma, where dQ of a tile comes while the next tile is under way. So a warpgroup seldom waits
// for another one, and P stays as it is, in fp32, until dS is made of it. Any mask, score and length. Kernels, each launched
// while the one before still runs:
//
//     backward_prepare      delta = rowsum(O dO) - dLSE, lse in log2, zeros for the counters of dQ
//     attention_backward    a CTA has a tile of keys, and all rows of Q that see it pass by, from the last ones up
//     backward_finish       dQ, from fp32 sums as warps hold them to rows
//     backward_finish_keys  dK and dV likewise, if `split_heads`: a CTA then has one head of Q, not all that share its keys
//
// The roles of a CTA of attention_backward:
//
//     producers, two threads   have TMA load K, then Q with lse; and V, then dO with delta
//     adders, two threads      each adds the part of dQ that one warpgroup computes; in turn, if `deterministic`
//     consumers, warpgroups    S^T = K Q^T and dP^T = V dO^T of a step of rows, dV += P^T dO, dK += dS^T Q; and dQ = dS K
//                              of the tile before, which they leave in `dq`
//
// A consumer's turn for a step. A product that is started runs on until it is waited for:
//
//     dS of the step           starts dV and dK, then dQ of the tile before, then S of the next step
//     waits for all but S      Q, dO and dS are released; dQ goes to its adder; starts dP of the next step
//     waits for S              P of the next step, while dP runs
//
// The barriers:
//
//     q, dout      full: TMA has brought the tile and its numbers. empty: no warp needs it
//     keys_full    K and V have come
//     ds_full      every warp has stored its dS of the tile. ds_empty: dQ of the tile is there, in every warp
//     dq_full      of each adder: the warps of its warpgroup have put dQ there. dq_empty: the adder has read it
//     keys_stored  in global memory, of each warp: the first head of a group has stored dV and dK, and others may add theirs
//     added        in global memory, of each part of a tile of dQ: how many tiles of keys have been added, as far as they count
//     barrier 1    of all consumers: no warp reads K any more
#include "any_attention.cuh"
#include "capped_scores.cuh"
#include "dq_bulk.cuh"
#include "held_columns.cuh"
#include "kept_bits.cuh"
#include "key_order.cuh"
#include "key_sums.cuh"
#include "near_scores.cuh"
#include "pipeline/roles.cuh"
#include "ptx/griddepcontrol.cuh"
#include "row_pipeline.cuh"

using namespace config;

using Share = Registers<num_groups, 1, 24>;  // the producers' warpgroup is the last one
using DqSums = Accumulator<16, dq_cols>;     // of a warp, of a tile
constexpr int warp_sums = 16 * dq_cols, group_sums = 4 * warp_sums, tile_sums = block_m * head_dim;
// The columns of a warpgroup's part of dQ that there are: of two that share columns, the second one may have fewer.
__device__ inline int columns_of_part(int group) { return head_dim % dq_cols && group == 1 ? head_dim % dq_cols : dq_cols; }
constexpr int last_row = block_m - step_rows;  // of a tile, where a step begins
// Of K and of V. A softcap leaves few registers, dropout some, and few S beside the sums, where there is no dQ to wait for.
constexpr int most_held = softcap || !wants_dq ? 16 : 80 - 32 * dropout;  // at 128 columns
constexpr int held = head_dim < 128 || held_columns < most_held ? held_columns : most_held;
constexpr int held_of_k = held < head_dim ? held : head_dim, held_of_v = held - held_of_k;
// P is computed when dP is there too, so that exponentials stand among the arithmetic of dS. With 64 columns it is better to do
// so while dP is under way.
constexpr bool at_once = head_dim > 64;
// With 64 columns ptxas finds no way round the branch to far scores while products run.
using Score = std::conditional_t<softcap && head_dim <= 64, CappedScores<softcap>, NearScores<softcap>>;

FLASHLADDER_WORKSPACE(dq_sum, float, "num_heads * (total_q // block_m + batch) * block_m * head_dim * wants_dq");
FLASHLADDER_WORKSPACE(added, unsigned, "num_heads * (total_q // block_m + batch) * 2");
FLASHLADDER_WORKSPACE(key_sums, float, "num_heads_k * (total_k // block_n + batch) * block_n * head_dim * 2 * split_heads");
FLASHLADDER_WORKSPACE(keys_stored, unsigned, "num_heads_k * (total_k // block_n + batch) * block_n // 16 * split_heads");
static_assert(num_groups == 2);

struct Maps { TensorMapBytes q, dout, k, v; };
struct Shared {
    dtype k[KTile::size], v[KTile::size];
    dtype ds[2][STile::size];
    RowPipeline<QTile, dtype, 3> q;  // of this tile, of the next one, and one that comes
    RowPipeline<QTile, dtype, 2> dout;
    float dq[num_groups][group_sums];  // on its way
    Mbarrier ds_full[2], ds_empty[2];
    Mbarrier dq_full[num_groups], dq_empty[num_groups];
    Mbarrier keys_full;
};

constexpr Launch over_keys = Launch{Share::num_threads, sizeof(Shared), block_m, block_n}
                                 .by_tma("q", block_m, 64, 128)
                                 .by_tma("dout", block_m, 64, 128)
                                 .by_tma("k", block_n, 64, 128)
                                 .by_tma("v", block_n, 64, 128)
                                 .dependent();

FLASHLADDER_KERNEL(backward_prepare, Params, pass(pass_threads));
extern "C" __global__ void __launch_bounds__(pass_threads)
    backward_prepare(const __grid_constant__ Params p, const __grid_constant__ SummedWorkspaces workspaces) {
    launch_dependents();
    const auto place = rows_of_cta<packed>(p);
    const Work work{p, place.batch};
    if constexpr (sums_keys) clear_counters(workspaces.keys_stored, work);
    if (packed && !place.is_in(work.seqlen_q, block_m)) return clear_rows_behind<pass_threads>(work, place);
    prepare_tile<false>(work, workspaces, place.number, columns_of_v<narrower>(p));
    if (wants_dq && threadIdx.x < num_groups)
        workspaces.added[work.padded_row(blockIdx.y, place.number) / block_m * num_groups + threadIdx.x] = 0;
}

// An adder: a warpgroup's part of each tile of dQ goes to its sums. The first tile of keys that a tile of Q sees stores it, so that
// nobody need write zeros, and the others wait for that; if `deterministic`, for each other in turn.
__device__ inline void add_tiles(Shared &shared, const SummedWorkspaces &workspaces, const Work &work, const Mask &mask,
                                 RowTiles tiles, int key_tile, int group) {
    float *staged = shared.dq[group];
    const int bytes = 64 * columns_of_part(group) * sizeof(float);
    wait_for_dependency();  // the counters are zero
    const int count = tiles.count();
#pragma unroll 1
    for (int i = 0; i < count; ++i, tiles.advance()) {
        const long long tile = work.padded_row(tiles.head, tiles.number) / block_m;
        float *sums = workspaces.dq_sum + tile * tile_sums + group * group_sums;
        unsigned *added = workspaces.added + tile * num_groups + group;
        const int before = tiles_before(work.p, mask, key_tile, tiles.number);
        if constexpr (deterministic)
            wait_until_added(added, before);
        else if (before > 0)
            wait_for_first(added);
        shared.dq_full[group].wait(i % 2);
        if (before == 0)
            bulk_store(sums, staged, bytes);
        else
            bulk_add(sums, staged, bytes);
        tma_store_commit();
        tma_store_wait_read();
        shared.dq_empty[group].arrive();
        if (deterministic || before == 0) {
            tma_store_wait();
            add_release(added, 1);
        }
    }
}

// A consumer warpgroup: dV and dK of its 64 keys, and its part of dQ of each tile.
__device__ inline void consume(Shared &shared, const SummedWorkspaces &workspaces, const Params &p, const Work &work,
                               const Mask &mask, RowTiles tiles, int head_k, int first_key) {
    const int warp = uniform_warp_index(), group = warp / 4, warp_key = warp * 16;
    const DqPart part{group};
    const int part_cols = columns_of_part(group);
    HeldColumns<held_of_k> keys;
    HeldColumns<held_of_v> values;
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

    Score score{p};
    const Dropout<dropout> dropping{p, work.batch, 0};
    Accumulator<16, head_dim> dv, dk;  // of this warp
    dv.clear();
    dk.clear();

    auto q_at = shared.q.consumer();
    auto dout_at = shared.dout.consumer();  // dS is at the same place

    Scores s, dp;
    ScoresOperand p_rounded, ds;
    KeptBits kept;
    DqSums dq;

    // S^T = K Q^T of a step
    auto start_scores = [&](int row) {
        if (row == 0) shared.q.wait(q_at);
        start_product<dtype, head_dim>(s, keys, q_rows.after(q_at.stage).below(row));
    };
    // dP^T = V dO^T of a step
    auto start_dp = [&](int row) {
        if (row == 0) shared.dout.wait(dout_at);
        start_product<dtype, head_dim>(dp, values, dout_rows.after(dout_at.stage).below(row));
    };
    // P^T of a step, whose dP is there then
    auto weigh = [&](int row) {
        const int first_row = tiles.number * block_m + row;
        const float slope = alibi_slope<alibi>(p, work.batch, tiles.head);
        if constexpr (dropout) kept.draw(Dropout<true>{p, work.batch, tiles.head}, first_row, first_key + warp_key);
        wait_for<!at_once>(s);
        if constexpr (at_once) stay_here(dp);
        score.apply(s);
        mask.hide(s, first_key + warp_key, first_row, score.hidden);
        weights<dtype, softcap, alibi>(s, p_rounded, shared.q.numbers[q_at.stage] + row, score.scale, slope,
                                       first_row + mask.shift - first_key - warp_key, score);
        if constexpr (!at_once) wait_for(dp);
    };
    // dS^T of a step, for dQ
    auto give_ds = [&](int row) {
        if (row == 0) shared.ds_empty[dout_at.stage].wait(dout_at.parity ^ 1 ^ dout_at.stage);
        store_scores(ds_place, dout_at.stage, row, ds);
        if (row != last_row) return;
        fence_proxy_async();
        __syncwarp();  // every lane has stored its part
        shared.ds_full[dout_at.stage].arrive_as_warp();
    };
    // dS^T of a step whose dP is there, and with it dV += P^T dO and dK += dS^T Q
    auto start_sums = [&](int row) {
        if constexpr (dropout) kept.drop(dp);
        weigh_gradients(dp, s, shared.dout.numbers[dout_at.stage] + row, dropout ? dropping.rescale : 1.0f);
        if constexpr (!softcap) p_rounded = round_to_operand<dtype>(s);
        if constexpr (dropout) p_rounded = kept.of(p_rounded);
        ds = round_to_operand<dtype>(dp);
        if constexpr (wants_dq) give_ds(row);
        if constexpr (wants_dkv) {
            start_sum<dtype, step_rows>(dv, p_rounded, dout_columns.after(dout_at.stage).below(row));
            start_sum<dtype, step_rows>(dk, ds, q_columns.after(q_at.stage).below(row));
        }
    };
    // All but the products that were started last
    auto wait_for_sums = [&](auto pending) {
        wait_for<decltype(pending)::value>(dv);
        stay_here(dk);
        stay_here(p_rounded);
        stay_here(ds);
    };
    // dQ = dS K of a tile whose dS is at `stage`, when all warps have stored it
    auto start_dq = [&](int stage, uint32_t parity) {
        shared.ds_full[stage].wait(parity);
        start_product<dtype, block_n>(dq, ds_columns.after(stage), k_columns);
    };
    // dQ of tile i, for its adder
    auto give_dq = [&](int is_odd) {
        shared.dq_empty[group].wait(is_odd ^ 1);
        stage_sums(shared.dq[group] + warp % 4 * 16 * part_cols, dq, part_cols);
        shared.dq_full[group].arrive_as_warp();
    };
    using None = std::integral_constant<int, 0>;
    using One = std::integral_constant<int, 1>;

    shared.keys_full.wait(0);
    keys.start(shared.k, warp_key);
    values.start(shared.v, warp_key);
    start_scores(0);
    start_dp(0);
    weigh(0);
    const int count = tiles.count();
    for (int left = count;; --left) {
#pragma unroll
        for (int row = 0; row < last_row; row += step_rows) {
            start_sums(row);
            start_scores(row + step_rows);
            wait_for_sums(One());
            start_dp(row + step_rows);
            weigh(row + step_rows);
        }
        start_sums(last_row);
        if (left == 1) break;
        const int q_stage = q_at.stage, stage = dout_at.stage, before = stage ^ 1;
        if constexpr (wants_dq) {
            start_dq(before, dout_at.parity ^ before);  // of the tile before the first one, too: its dS is 0
            wait_for_sums(One());
        }
        q_at.advance();
        start_scores(0);
        if constexpr (wants_dq)
            wait_for<1>(dq);
        else
            wait_for_sums(One());
        __syncwarp();  // every lane has read its numbers
        shared.q.release(q_stage);
        shared.dout.release(stage);
        if constexpr (wants_dq) {
            shared.ds_empty[before].arrive_as_warp();
            if (left < count) give_dq(before);
        }
        tiles.advance();
        dout_at.advance();
        start_dp(0);
        weigh(0);
    }
    wait_for_sums(None());
    const int stage = dout_at.stage, end_key = min(block_n, work.seqlen_k - first_key);
    if constexpr (wants_dq) {
        if (count > 1) {
            start_dq(stage ^ 1, dout_at.parity ^ stage ^ 1);
            wait_for(dq);
            give_dq(stage ^ 1);
        }
        start_dq(stage, dout_at.parity);
    }
    if constexpr (wants_dkv && !split_heads) {
        if constexpr (!wants_dq) named_barrier_sync(1, num_groups * warpgroup_threads);  // no warp reads V any more
        if constexpr (dropout) scale(dv, dropping.rescale);
        store_keys(shared.v, warp_key, work.like_k(p.dv, p.dv_stride, head_k), p.dv_stride.row, first_key, end_key, dv,
                   columns_of_v<narrower>(p));
    }
    if constexpr (wants_dq) {
        wait_for(dq);
        give_dq(stage);
    }
    if constexpr (wants_dkv) {
        if constexpr (wants_dq || split_heads) named_barrier_sync(1, num_groups * warpgroup_threads);  // nor K
        if constexpr (split_heads) {
            sum_keys(workspaces, work, shared.k, tiles.head, first_key / block_n, dv, dk);
        } else {
            scale(dk, p.softmax_scale);
            store_keys(shared.k, warp_key, work.like_k(p.dk, p.dk_stride, head_k), p.dk_stride.row, first_key, end_key, dk,
                       columns_of<narrower>(p));
        }
    }
}

FLASHLADDER_KERNEL(attention_backward, Params, over_keys_and_heads(over_keys));
extern "C" __global__ void __launch_bounds__(Share::num_threads, 1)
    attention_backward(const __grid_constant__ Params p, const __grid_constant__ SummedWorkspaces workspaces,
                       const __grid_constant__ Maps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);

    launch_dependents();
    const auto place = keys_of_cta<packed, by_sections>(p, from_last_keys(p));
    const Work work{p, place.batch};
    if (packed && !place.is_in(work.seqlen_k, block_n)) {
        if (!split_heads) clear_keys_behind<Share::num_threads>(work, place);
        return;
    }
    const Mask mask = mask_of(work);
    const int first_key = place.number * block_n, last_key = min(first_key + block_n, work.seqlen_k) - 1;

    const RowTiles tiles = tiles_of_heads(mask, work, first_key, last_key, place.head);
    const int head_k = split_heads ? head_of_keys(p, place.head) : place.head;
    if ((window || packed) && tiles.count() <= 0) {  // no row sees them
        if (wants_dkv && !split_heads) clear_gradients<Share::num_threads>(work, head_k, first_key, last_key);
        return;
    }

    for (int i = threadIdx.x; i < STile::size / chunk; i += Share::num_threads)
        reinterpret_cast<uint4 *>(shared.ds[1])[i] = {};
    fence_proxy_async();
    if (threadIdx.x == 0) {
        shared.q.init(num_groups * 4);
        shared.dout.init(num_groups * 4);
        for (Mbarrier &full : shared.ds_full) full.init(num_groups * 4);
        for (Mbarrier &empty : shared.ds_empty) empty.init(num_groups * 4);
        for (Mbarrier &full : shared.dq_full) full.init(4);
        for (Mbarrier &empty : shared.dq_empty) empty.init(1);
        shared.keys_full.init(2);
        fence_mbarrier_init();
    }
    __syncthreads();  // the barriers are made, and a dS of zeros

    if (warpgroup_index() == num_groups) {
        release_registers<Share::producer>();
        if (lane_index() != 0) return;
        const int role = warp_index() % 4;
        if (role < num_groups) {
            if constexpr (wants_dq) add_tiles(shared, workspaces, work, mask, tiles, place.number, role);
            return;
        }
        const MapPlace at = place_of_keys<packed>(work);
        if (role == 2) {
            load_tile<KTile>(shared.k, maps.k, shared.keys_full, at.first + first_key, head_k, at.last);
            load_tiles(shared.q, maps.q, workspaces.lse, work, tiles);
        } else {
            load_tile<KTile>(shared.v, maps.v, shared.keys_full, at.first + first_key, head_k, at.last);
            load_tiles(shared.dout, maps.dout, workspaces.delta, work, tiles);
        }
        return;
    }
    take_registers<Share::consumer>();
    consume(shared, workspaces, p, work, mask, tiles, head_k, first_key);
}

FLASHLADDER_KERNEL(backward_finish, Params, last_pass(finish_threads, QTile::size * sizeof(dtype)));
extern "C" __global__ void __launch_bounds__(finish_threads)
    backward_finish(const __grid_constant__ Params p, const __grid_constant__ SummedWorkspaces workspaces) {
    if constexpr (sums_keys) launch_dependents();
    extern __shared__ __align__(1024) char memory[];
    const auto place = rows_of_cta<packed>(p);
    const Work work{p, place.batch};
    if (packed && !place.is_in(work.seqlen_q, block_m)) return;
    const int first_row = place.number * block_m;
    const int group = warpgroup_index(), part_cols = columns_of_part(group);
    float *sums = workspaces.dq_sum + work.padded_row(blockIdx.y, place.number) / block_m * tile_sums + group * group_sums +
                  warp_index() % 4 * 16 * part_cols;
    wait_for_dependency();  // the sums are complete
    finish_tile(p.softmax_scale, sees_keys(work, first_row) ? load_sums<dq_cols>(sums, part_cols) : DqSums{}, reinterpret_cast<dtype *>(memory),
                work.like_q(p.dq, p.dq_stride, blockIdx.y) + first_row * p.dq_stride.row, p.dq_stride.row,
                work.seqlen_q - first_row, columns_of<narrower>(p));
}

FLASHLADDER_KERNEL(backward_finish_keys, Params, last_pass_of_keys(key_warps * 32, KTile::size * sizeof(dtype)));
extern "C" __global__ void __launch_bounds__(key_warps * 32)
    backward_finish_keys(const __grid_constant__ Params p, const __grid_constant__ SummedWorkspaces workspaces) {
    extern __shared__ __align__(1024) char memory[];
    finish_keys(p, workspaces, reinterpret_cast<dtype *>(memory));
}
