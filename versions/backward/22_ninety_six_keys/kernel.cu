// The gradients of a tile of 96 keys with up to 192 columns, by wgmma, for any mask, score and length. Three kernels, each
// launched while the one before still runs:
//
//     backward_prepare      delta = rowsum(O dO) - dLSE, lse in log2, zeros for dQ
//     attention_backward    a CTA has a tile of 96 keys, and all rows of Q that see it pass by, 64 at a time,
//                           from the last ones up; or from the first ones down, see key_order.cuh
//     backward_finish       dQ, from fp32 sums as warps hold them to rows
//
// The roles of a CTA of attention_backward:
//
//     producers, two threads     have TMA load K, then Q with lse; and V, then dO with delta
//     turn keepers, two threads  wait until a warpgroup may add its dQ, and tell when it has; if `deterministic`
//     warpgroup 0, "keys"        S = Q K^T, dP = dO V^T, P and dS of 48 keys;    dK^T += Q^T dS;    a panel of dQ = dS K
//     warpgroup 1, "values"      the same of the other 48 keys;                  dV^T += dO^T P;    the other panels
//
// A gradient has its columns as rows, 64 of them a product, and all keys as columns. P and dS cross shared memory, rounded. A step,
// where a product that is started runs on until it is waited for:
//
//     S(i), dP(i) are done     P(i), dS(i) go to shared memory. Starts dQ(i-1); when the other half is there too, dV(i) or dK(i)
//     dQ(i-1) is done          is added to its sums. Starts S(i+1), dP(i+1), under which dV(i) and dK(i) end
//
// With three places for Q, S(i+1) starts before the other half is waited for.
//
// The barriers:
//
//     q, dout      full: TMA has brought the tile and its numbers. empty: neither warpgroup needs it
//     keys_full    K and V have come
//     full         of a place of dS: all warps have put P and dS of the tile there
//     empty        no warp needs P of the tile any more, nor dS of the tile before, whose dQ is there
//     turns        if `deterministic`, of each warpgroup. begun: it may add its part of a tile of dQ. ended: its warps have
//     added        in global memory, if `deterministic`, of each warpgroup's part of a tile of dQ: tiles of keys that are in it
//     barrier 1    of both warpgroups: nobody reads K and V any more. 2 and 3, of one: its gradient is in shared memory
#include "capped_scores.cuh"
#include "dq_bulk.cuh"
#include "pipeline/roles.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/reduce.cuh"
#include "query_rows.cuh"
#include "row_pipeline.cuh"
#include "turn.cuh"
#include "warpgroup_tiles.cuh"

using namespace config;

using Share = Registers<2, 1, 24>;  // the producer's warpgroup is the last one
constexpr int consumer_warps = 8;
constexpr int part_keys = block_n / 2;  // of a warpgroup, of S and dP
constexpr bool scores_ahead = num_stages > 2;
constexpr int dq_turns = 2;  // of a tile, of each warpgroup
constexpr int p_place = 2;  // behind two places of dS

using VTile = SwizzledPanels<block_n, head_dim_v>;
using DoutTile = SwizzledPanels<block_m, head_dim_v>;
using QRing = RowPipeline<QTile, dtype, num_stages>;
using DoutRing = RowPipeline<DoutTile, dtype, num_stages>;
using Gradient = Accumulator<16, block_n>;   // 16 columns of a panel of dK or dV, of a warp

constexpr int warp_sums = 16 * dq_cols;  // of a warp, of a panel of dQ
constexpr int panel_sums = block_m * dq_cols;

FLASHLADDER_WORKSPACE(dq_sum, float, "num_heads * (total_q // block_m + batch) * block_m * head_dim * wants_dq");
FLASHLADDER_WORKSPACE(added, unsigned, "num_heads * (total_q // block_m + batch) * 2 * deterministic");  // dq_turns

struct Maps { TensorMapBytes q, dout, k, v; };
struct Shared {
    dtype k[KTile::size], v[VTile::size];
    dtype scores[3][STile::size];  // dS^T of two tiles, and P^T of one
    QRing q;
    DoutRing dout;
    Mbarrier full[2], empty;
    Mbarrier keys_full;
    Turn turns[dq_turns];
};

// The gradient of a warpgroup, and its panels of dQ.
struct Keys {
    static constexpr int number = 0;
    using Tile = KTile;
    using Rows = QTile;
    static constexpr int first_panel = QTile::panels - 1, panels = 1;
};
struct Values {
    static constexpr int number = 1;
    using Tile = VTile;
    using Rows = DoutTile;
    static constexpr int first_panel = 0, panels = QTile::panels - 1;
};

FLASHLADDER_KERNEL(backward_prepare, Params, pass(pass_threads));
extern "C" __global__ void __launch_bounds__(pass_threads)
    backward_prepare(const __grid_constant__ Params p, const __grid_constant__ CountedWorkspaces workspaces) {
    launch_dependents();
    const auto place = rows_of_cta<packed>(p);
    const Work work{p, place.batch};
    if (packed && !place.is_in(work.seqlen_q, block_m)) return clear_rows_behind<pass_threads>(work, place);
    prepare_tile<wants_dq>(work, workspaces, place.number, columns_of_v<narrower>(p));
    if (deterministic && threadIdx.x < dq_turns)
        workspaces.added[work.padded_row(blockIdx.y, place.number) / block_m * dq_turns + threadIdx.x] = 0;
}

// What a warpgroup's gradient is made of beside P or dS: Q, or dO.
template <class Role>
__device__ inline auto &ring_of(Shared &shared) {
    if constexpr (Role::number == 0)
        return shared.q;
    else
        return shared.dout;
}

// The loop of a warpgroup. Leaves its gradient in `sum`.
template <class Role>
__device__ inline void sum_gradient(const Params &p, const CountedWorkspaces &workspaces, Shared &shared, const Work &work,
                                    const Mask &mask, RowTiles tiles, int key_tile, Gradient (&sum)[Role::Tile::panels]) {
    constexpr bool has_values = Role::number == 1;
    constexpr int gradients = wants_dkv ? Role::Tile::panels : 0;  // products
    // Registers of a thread: where S of the next tile has no room beside the gradient and dQ, dQ is added before it is started.
    constexpr int of_gradient = Role::Tile::panels * block_n / 2, of_dq = Role::panels * dq_cols / 2, of_s = part_keys / 2;
    constexpr int most_registers = 208;  // of 240; addresses and counters take the others
    constexpr bool adds_first = of_gradient + of_dq + of_s > most_registers;
    static_assert(!(adds_first && scores_ahead), "the loop ends before the last dQ but one is added");

    const int warp = uniform_warp_index() % 4, part = Role::number * part_keys, first_key = key_tile * block_n + part;
    const Near<ByRows<QTile>> q_rows(shared.q.tiles[0]);
    const Near<ByRows<DoutTile>> dout_rows(shared.dout.tiles[0]);
    const Near<ByRows<KTile>> k_rows(shared.k, part);
    const Near<ByRows<VTile>> v_rows(shared.v, part);
    const Near<ByColumns<typename Role::Rows>> columns(ring_of<Role>(shared).tiles[0]);
    const Near<ByRows<STile>> scores_rows(shared.scores[0]);
    const Near<ByColumns<STile>> ds_columns(shared.scores[0]);
    const Near<ByColumns<KTile>> k_columns(shared.k, 0, Role::first_panel * dq_cols);
    HoistedColumns<STile, dtype, ByRow> scores_place;
    scores_place.start(shared.scores[0] + STile::step(part, 0), warp * 16);

    const int count = tiles.count();
    const CappedScores<softcap> score{p};
    const float rescale = dropout ? Dropout<dropout>{p, work.batch, 0}.rescale : 1.0f;
    auto at = shared.q.consumer();  // of Q and dO alike
    PipelineState<2> place{0};      // of dS
    RowTiles due = tiles;       // whose dQ comes next
    uint32_t turn_parity = 0;        // of its turns

    Accumulator<16, part_keys> s, dp;
    Accumulator<16, Role::panels * dq_cols> dq;
#pragma unroll
    for (Gradient &of_panel : sum) of_panel.clear();

    auto start_scores = [&](const auto &next) {
        shared.q.wait(next);
        start_product<dtype, head_dim>(s, q_rows.after(next.stage), k_rows.made_anew());
    };
    auto start_dp = [&](const auto &next) {
        shared.dout.wait(next);
        start_product<dtype, head_dim_v>(dp, dout_rows.after(next.stage), v_rows.made_anew());
    };
    // P and dS of the tile whose S and dP are under way, for both warpgroups.
    auto weigh = [&] {
        const int first_row = tiles.number * block_m + warp * 16;
        HeldA<16, part_keys> operand;
        KeptKeys<part_keys> kept;
        if constexpr (dropout) kept.draw(Dropout<true>{p, work.batch, tiles.head}, first_row, first_key);
        const float slope = alibi_slope<alibi>(p, work.batch, tiles.head);
        wait_for<1>(s);  // dP is under way, while P is computed
        score.apply(s);
        hide_keys(mask, s, first_row, first_key);
        weigh_keys<dtype>(s, operand, LaneNumbers{shared.q.numbers[at.stage] + warp * 16}, score.scale, slope,
                          first_row + mask.shift - first_key);
        shared.empty.wait(place.stage ^ 1);
        if constexpr (wants_dkv) {
            if constexpr (!softcap) operand = round_to_operand<dtype>(s);
            if constexpr (dropout) kept.drop(operand);
            store_transposed(scores_place, p_place, 0, operand);
        }
        wait_for(dp);
        if constexpr (dropout) kept.drop(dp);
        weigh_key_gradients(dp, s, LaneNumbers{shared.dout.numbers[at.stage] + warp * 16}, rescale);
        store_transposed(scores_place, place.stage, 0, round_to_operand<dtype>(dp));
        fence_proxy_async();
        __syncwarp();  // every lane has stored its part
        shared.full[place.stage].arrive_as_warp();
    };
    // dK^T += Q^T dS, or dV^T += dO^T P, panel by panel
    auto start_gradient = [&] {
        shared.full[place.stage].wait(place.parity);
        const auto of_columns = columns.after(at.stage);
        const auto weights = scores_rows.after(has_values ? p_place : place.stage);
#pragma unroll
        for (int panel = 0; panel < gradients; ++panel)
            start_product<dtype, block_m>(sum[panel], of_columns.right(panel * 64), weights, true);
    };
    auto wait_for_gradient = [&](auto pending) {
        wgmma_wait<decltype(pending)::value>();
#pragma unroll
        for (Gradient &of_panel : sum) stay_here(of_panel);
    };
    // dQ = dS K of the tile whose dS is at `stage`
    auto start_dq = [&](int stage) {
        if constexpr (wants_dq) start_product<dtype, block_n>(dq, ds_columns.after(stage), k_columns.made_anew());
    };
    // Adds it to its sums; if `deterministic`, when it is the turn of this tile of keys.
    auto add_dq = [&] {
        if constexpr (!wants_dq) return;
        const long long row = work.padded_row(due.head, due.number);
        Turn &turn = shared.turns[Role::number];
        if constexpr (deterministic) turn.begun.wait(turn_parity);
        float *sums = workspaces.dq_sum + row * head_dim + Role::first_panel * panel_sums + warp * warp_sums;
#pragma unroll
        for (int n = 0; n < Role::panels * dq_cols / 8; ++n)
            add_global_16(reinterpret_cast<float4 *>(sums + n * 8 / dq_cols * panel_sums) + n * 8 % dq_cols * 4 + lane_index(),
                          dq.block[0][n]);
        if constexpr (deterministic) {
            __syncwarp();  // every lane has added its part
            turn.ended.arrive_as_warp();
            turn_parity ^= 1;
        }
        due.advance();
    };
    auto wait_for_dq = [&](auto pending) {
        if constexpr (wants_dq) wait_for<decltype(pending)::value>(dq);
    };
    using None = std::integral_constant<int, 0>;
    using Gradients = std::integral_constant<int, gradients>;
    // Starts the gradient of the tile whose P and dS are there, behind dQ of the tile before. The first time that
    // is a product of the zeros in place 1, which nobody adds.
    auto sum_tile = [&] {
        start_dq(place.stage ^ 1);
        start_gradient();
        wait_for_dq(Gradients());
    };
    using Next = std::integral_constant<int, scores_ahead ? 1 : 2>;  // products of the next tile that may run on

    shared.keys_full.wait(0);
    start_scores(at);
    start_dp(at);
    weigh();
    for (int left = count;; --left) {
        auto next = at;
        next.advance();
        if constexpr (scores_ahead) {
            if (left == 1) break;
            start_scores(next);
        }
        sum_tile();
        if (adds_first && left < count) add_dq();
        if constexpr (!scores_ahead) {
            if (left == 1) break;
            start_scores(next);
        }
        if (!adds_first && left < count) add_dq();
        start_dp(next);
        wait_for_gradient(Next());
        shared.q.release(at.stage);
        shared.dout.release(at.stage);
        shared.empty.arrive_as_warp();
        at = next;
        place.advance();
        tiles.advance();
        weigh();
    }
    if constexpr (scores_ahead) sum_tile();
    if (!adds_first && count > 1) add_dq();
    start_dq(place.stage);
    wait_for_gradient(None());
    place.advance();
    wait_for_dq(None());
    add_dq();
    named_barrier_sync(1, consumer_warps * 32);  // nobody reads K and V any more
}

// What a warpgroup has summed, to a head of dV or dK.
template <class Role, class Columns>
__device__ inline void store_gradient(dtype *shared, Gradient (&sum)[Role::Tile::panels], float by, dtype *global,
                                      long long row_stride, int first_key, int seqlen_k, const Columns &columns) {
    constexpr int rows = block_n / 4;  // of a warp
    using Tile = typename Role::Tile;
    const int warp = uniform_warp_index() % 4;
    HoistedColumns<Tile, dtype, ByRow> place;
    place.start(shared, warp * 16);
#pragma unroll
    for (int panel = 0; panel < Tile::panels; ++panel) {
        scale(sum[panel], by);
        store_transposed(place, 0, panel * 64, round_to_operand<dtype>(sum[panel]));
    }
    named_barrier_sync(2 + Role::number, warpgroup_threads);  // the tile is whole
    store_rows_before<Tile, rows, StoreDefault>(min(block_n, seqlen_k - first_key), global + first_key * row_stride, row_stride,
                                                shared, warp * rows, columns);
}

FLASHLADDER_KERNEL(attention_backward, Params,
                   over_tiles_of_keys(Launch{Share::num_threads, sizeof(Shared), block_m, block_n}
                                          .by_tma("q", block_m, 64, 128)
                                          .by_tma("dout", block_m, 64, 128)
                                          .by_tma("k", block_n, 64, 128)
                                          .by_tma("v", block_n, 64, 128)
                                          .dependent(),
                                      "num_heads_k"));
extern "C" __global__ void __launch_bounds__(Share::num_threads, 1)
    attention_backward(const __grid_constant__ Params p, const __grid_constant__ CountedWorkspaces workspaces,
                       const __grid_constant__ Maps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);

    launch_dependents();
    const auto place = keys_of_cta<packed, by_sections>(p, from_last_keys(p));
    const Work work{p, place.batch};
    if (packed && !place.is_in(work.seqlen_k, block_n)) return clear_keys_behind<Share::num_threads>(work, place);
    const Mask mask = mask_of(work);
    const int first_key = place.number * block_n, last_key = min(first_key + block_n, work.seqlen_k) - 1;

    const int group_heads = p.num_heads / p.num_heads_k, end_row = min(mask.end_row(last_key), work.seqlen_q);
    const RowTiles tiles{mask.first_row(first_key), end_row, place.head * group_heads, group_heads};
    if ((window || packed) && tiles.count() <= 0) {  // no row sees them
        if (wants_dkv) clear_gradients<Share::num_threads>(work, place.head, first_key, last_key);
        return;
    }

    for (int i = threadIdx.x; i < STile::size / chunk; i += Share::num_threads)
        reinterpret_cast<uint4 *>(shared.scores[1])[i] = {};
    fence_proxy_async();
    if (threadIdx.x == 0) {
        shared.q.init(consumer_warps);
        shared.dout.init(consumer_warps);
        for (Mbarrier &full : shared.full) full.init(consumer_warps);
        shared.empty.init(consumer_warps);
        shared.keys_full.init(2);
        if constexpr (deterministic)
            for (Turn &turn : shared.turns) turn.init(4);
        fence_mbarrier_init();
    }
    __syncthreads();  // the barriers are made, and a dS of zeros

    if (warpgroup_index() == 2) {
        release_registers<Share::producer>();
        if (lane_index() != 0) return;
        const MapPlace at = place_of_keys<packed>(work);
        if (warp_index() == consumer_warps) {
            load_tile<KTile>(shared.k, maps.k, shared.keys_full, at.first + first_key, place.head, at.last);
            load_tiles(shared.q, maps.q, workspaces.lse, work, tiles);
        } else if (warp_index() == consumer_warps + 1) {
            load_tile<VTile>(shared.v, maps.v, shared.keys_full, at.first + first_key, place.head, at.last);
            load_tiles(shared.dout, maps.dout, workspaces.delta, work, tiles);
        } else if constexpr (deterministic && wants_dq) {
            const int role = warp_index() - consumer_warps - 2;
            keep_turns(shared.turns, role, role + 1, workspaces, work, mask, tiles, place.number);
        }
        return;
    }
    take_registers<Share::consumer>();

    if (uniform_warp_index() < 4) {
        Gradient dk[KTile::panels];
        sum_gradient<Keys>(p, workspaces, shared, work, mask, tiles, place.number, dk);
        if constexpr (!wants_dkv) return;
        store_gradient<Keys>(shared.k, dk, p.softmax_scale, work.like_k(p.dk, p.dk_stride, place.head), p.dk_stride.row, first_key,
                             work.seqlen_k, columns_of<narrower>(p));
    } else {
        Gradient dv[VTile::panels];
        sum_gradient<Values>(p, workspaces, shared, work, mask, tiles, place.number, dv);
        if constexpr (!wants_dkv) return;
        const float rescale = dropout ? Dropout<dropout>{p, work.batch, 0}.rescale : 1.0f;
        store_gradient<Values>(shared.v, dv, rescale, work.like_k(p.dv, p.dv_stride, place.head), p.dv_stride.row, first_key,
                               work.seqlen_k, columns_of_v<narrower>(p));
    }
}

FLASHLADDER_KERNEL(backward_finish, Params, last_pass(finish_threads, QTile::size * sizeof(dtype)));
extern "C" __global__ void __launch_bounds__(finish_threads)
    backward_finish(const __grid_constant__ Params p, const __grid_constant__ CountedWorkspaces workspaces) {
    extern __shared__ __align__(1024) char memory[];
    const auto place = rows_of_cta<packed>(p);
    const Work work{p, place.batch};
    if (packed && !place.is_in(work.seqlen_q, block_m)) return;
    const int first_row = place.number * block_m;
    float *sums = workspaces.dq_sum + work.padded_row(blockIdx.y, place.number) * head_dim + warp_index() * warp_sums;
    wait_for_dependency();  // the sums are complete
    finish_tile(p.softmax_scale, load_sums<dq_cols>(sums), reinterpret_cast<dtype *>(memory),
                work.like_q(p.dq, p.dq_stride, blockIdx.y) + first_row * p.dq_stride.row, p.dq_stride.row,
                work.seqlen_q - first_row, columns_of<narrower>(p));
}
