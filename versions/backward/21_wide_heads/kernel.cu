// The gradients of a tile of keys with up to 256 columns, by wgmma, for any mask, score and length. Three kernels, each
// launched while the one before still runs:
//
//     backward_prepare      delta = rowsum(O dO) - dLSE, lse in log2, zeros for dQ
//     attention_backward    a CTA has a tile of 64 keys, and all rows of Q that see it pass by, 64 at a time,
//                           from the last ones up; or from the first ones down, see key_order.cuh
//     backward_finish       dQ, from fp32 sums as warps hold them to rows
//
// The roles of a CTA of attention_backward:
//
//     producers, two threads     have TMA load K, then Q with lse; and V, then dO with delta
//     turn keepers, two threads  wait until a warpgroup may add a panel, and tell when it has; if `deterministic`
//     warpgroup 0, "values"      S^T = K Q^T, P^T;         dV += P^T dO;   the first panels of dQ = dS K
//     warpgroup 1, "keys"        dP^T = V dO^T, dS^T;      dK += dS^T Q;   the others
//
// Each has the sums of one gradient in registers, 128 of a thread at 256 columns. A step, of which nothing is under way at
// its end, so that the two wait for each other late:
//
//     values   dV(i)  dQ(i-1)  S(i+1)     P(i+1) ------+
//     keys     dK(i)  dQ(i-1)  dP(i+1)                 +---> dS(i+1)
//
// The barriers:
//
//     q, dout      full: TMA has brought the tile and its numbers. empty: neither warpgroup needs it
//     keys_full    K and V have come
//     p_full       of each warp of `keys`: the warp of `values` with the same keys has put P^T there. p_empty: it is read
//     ds_full      all warps of `keys` have put dS^T there. ds_empty: both warpgroups have multiplied it by K
//     turns        if `deterministic`, of each panel of dQ. begun: its warpgroup may add it. ended: its warps have
//     added        in global memory, if `deterministic`, of each panel of a tile of dQ: tiles of keys that are in it
//     barrier 1    of both warpgroups: nobody reads K and V any more
#include "any_attention.cuh"
#include "capped_scores.cuh"
#include "dq_bulk.cuh"
#include "kept_bits.cuh"
#include "pipeline/roles.cuh"
#include "ptx/cluster.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/reduce.cuh"
#include "row_pipeline.cuh"
#include "turn.cuh"
#include "warpgroup_tiles.cuh"

#include <type_traits>

using namespace config;

using Share = Registers<2, 1, 24>;  // the producer's warpgroup is the last one
constexpr int consumer_warps = 8;

using VTile = SwizzledPanels<block_n, head_dim_v>;
using DoutTile = SwizzledPanels<block_m, head_dim_v>;
using QRing = RowPipeline<QTile, dtype, num_stages>;
using DoutRing = RowPipeline<DoutTile, dtype, num_stages>;
using ScoresRing = PipelineState<2>;  // the places of dS

using DqSums = Accumulator<16, dq_cols>;  // of a warp, of a panel
constexpr int warp_sums = 16 * dq_cols;
constexpr int panel_sums = block_m * dq_cols;
constexpr int dq_turns = QTile::panels;  // of a tile

FLASHLADDER_WORKSPACE(dq_sum, float, "num_heads * (total_q // block_m + batch) * block_m * head_dim * wants_dq");
FLASHLADDER_WORKSPACE(added, unsigned, "num_heads * (total_q // block_m + batch) * head_dim // 64 * deterministic");  // dq_turns

struct Maps { TensorMapBytes q, dout, k, v; };
struct Shared {
    dtype k[KTile::size], v[VTile::size];
    dtype ds[2][STile::size];
    QRing q;
    DoutRing dout;
    float p[4][16 * step_rows];  // of each pair of warps
    Mbarrier p_full[4], p_empty[4];
    Mbarrier ds_full[2], ds_empty[2];
    Mbarrier keys_full;
    Turn turns[dq_turns];
};

// What a warpgroup multiplies: a tile that stays by the rows of one that passes, and what comes of it by the columns of
// the other one. And which panels of dQ it has.
struct Values {
    using Stays = KTile;
    using Rows = QTile;
    using Columns = DoutTile;
    static constexpr int first_panel = 0, panels = (QTile::panels + 1) / 2;
};
struct Keys {
    using Stays = VTile;
    using Rows = DoutTile;
    using Columns = QTile;
    static constexpr int first_panel = Values::panels, panels = QTile::panels - first_panel;
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

// The loop of a warpgroup. Leaves its gradient in `sum`.
template <class Role>
__device__ inline void sum_gradient(const Params &p, const CountedWorkspaces &workspaces, Shared &shared, const Work &work,
                                    const Mask &mask, RowTiles next, int key_tile,
                                    Accumulator<16, Role::Columns::cols> &sum) {
    constexpr bool has_values = std::is_same_v<Role, Values>;
    static_assert(Role::panels == 1 || Role::panels == 2, "a panel of dQ before S or dP, and one behind it");
    auto &rows_ring = [&]() -> auto & { if constexpr (has_values) return shared.q; else return shared.dout; }();
    auto &columns_ring = [&]() -> auto & { if constexpr (has_values) return shared.dout; else return shared.q; }();

    const int warp = uniform_warp_index() % 4, first_key = key_tile * block_n + warp * 16;  // of the warp
    ByRows<typename Role::Stays> keys;
    ByRows<typename Role::Rows> rows;
    ByColumns<typename Role::Columns> columns;
    ByColumns<STile> ds_columns;
    ByColumns<KTile> k_columns[Role::panels];
    // Without a rank an address has few bits, and descriptors take fewer additions.
    keys.start(without_rank(has_values ? shared.k : shared.v));
    rows.start(rows_ring.tiles[0]);
    columns.start(columns_ring.tiles[0]);
    ds_columns.start(shared.ds[0]);
    for (int i = 0; i < Role::panels; ++i) k_columns[i].start(without_rank(shared.k), (Role::first_panel + i) * dq_cols);
    HoistedReader<STile, dtype> ds_place;
    ds_place.start(shared.ds[0], warp * 16);

    const int count = next.count();
    const CappedScores<softcap> score{p};
    const float rescale = dropout ? Dropout<dropout>{p, work.batch, 0}.rescale : 1.0f;
    auto rows_at = rows_ring.consumer();
    auto columns_at = columns_ring.consumer();
    ScoresRing ds_at{0}, ds_put{1};
    PipelineState<1> p_at{has_values};
    RowTiles due = next;     // whose dQ comes next
    uint32_t turn_parity = 0;      // of its turns

    Scores s;
    ScoresOperand operand;
    DqSums dq;
    if constexpr (wants_dkv) sum.clear();

    // S^T = K Q^T, or dP^T = V dO^T
    auto start_next = [&] {
        rows_ring.wait(rows_at);
        start_product<dtype, Role::Rows::cols>(s, keys, rows.after(rows_at.stage));
    };
    // dV += P^T dO, or dK += dS^T Q
    auto start_gradient = [&] {
        columns_ring.wait(columns_at);
        if constexpr (wants_dkv) start_sum<dtype, step_rows>(sum, operand, columns.after(columns_at.stage));
    };
    // When that is done, nobody here needs the tiles of Q and of dO; they have the same place in their rings.
    auto end_gradient = [&] {
        if constexpr (wants_dkv) {
            stay_here(sum);
            stay_here(operand);
        }
        if constexpr (!wants_dq) __syncwarp();  // every lane has its numbers; with dQ the fence of dS says so
        rows_ring.release(columns_at.stage);
        columns_ring.release(columns_at.stage);
        columns_at.advance();
    };
    // P^T of the tile whose S is under way, or dS^T of that whose dP is; `pending` products were started behind it.
    auto find_operand = [&](auto pending) {
        const int first_row = next.number * block_m;
        const float *numbers = rows_ring.numbers[rows_at.stage];
        KeptBits kept;
        if constexpr (dropout) kept.draw(Dropout<true>{p, work.batch, next.head}, first_row, first_key);
        const float slope = alibi_slope<(alibi && has_values)>(p, work.batch, next.head);
        wait_for<decltype(pending)::value>(s);
        if constexpr (has_values) {
            score.apply(s);
            mask.hide(s, first_key, first_row);
            weights<dtype, softcap, alibi>(s, operand, numbers, score.scale, slope, first_row + mask.shift - first_key);
            if constexpr (!softcap) operand = round_to_operand<dtype>(s);
            if constexpr (dropout) operand = kept.of(operand);
        } else {
            if constexpr (dropout) kept.drop(s);
            each_row_of_q(s, numbers, [&](float &gradient, float delta) { gradient = rescale * gradient - delta; });
            shared.p_full[warp].wait(p_at.parity);
            each_block(s, shared.p[warp], [](const float4 *place, float (&x)[4]) {
                const float4 of = *place;
                x[0] *= of.x, x[1] *= of.y, x[2] *= of.z, x[3] *= of.w;
            });
            __syncwarp();
            shared.p_empty[warp].arrive_as_warp();
            p_at.advance();
            operand = round_to_operand<dtype>(s);
        }
        rows_at.advance();
        next.advance();
    };
    // Gives what dP^T is multiplied by to the other warpgroup, or dS^T to both.
    auto publish = [&] {
        if constexpr (has_values) {
            shared.p_empty[warp].wait(p_at.parity);
            each_block(s, shared.p[warp], [](float4 *place, const float (&x)[4]) { *place = {x[0], x[1], x[2], x[3]}; });
            __syncwarp();
            shared.p_full[warp].arrive_as_warp();
            p_at.advance();
        } else if constexpr (wants_dq) {
            shared.ds_empty[ds_put.stage].wait(ds_put.parity);
            store_scores(ds_place, ds_put.stage, 0, operand);
            fence_proxy_async();
            __syncwarp();
            shared.ds_full[ds_put.stage].arrive_as_warp();
            ds_put.advance();
        }
    };
    // A panel of dQ = dS K
    auto start_dq = [&](int panel) {
        if constexpr (!wants_dq) return;
        if (panel == 0) shared.ds_full[ds_at.stage].wait(ds_at.parity);
        start_product<dtype, block_n>(dq, ds_columns.after(ds_at.stage), k_columns[panel]);
    };
    auto wait_for_dq = [&](auto pending) {
        wgmma_wait<decltype(pending)::value>();
        if constexpr (wants_dq) stay_here(dq);
    };
    // Adds it to its sums; if `deterministic`, when it is the turn of this tile of keys.
    auto add_dq = [&](int panel) {
        if constexpr (!wants_dq) return;
        const long long row = work.padded_row(due.head, due.number);
        Turn &turn = shared.turns[Role::first_panel + panel];
        if constexpr (deterministic) turn.begun.wait(turn_parity);
        float *sums = workspaces.dq_sum + row * head_dim + (Role::first_panel + panel) * panel_sums + warp * warp_sums;
        each_block(dq, sums, [](float4 *place, const float (&x)[4]) { add_global_16(place, x); });
        if constexpr (!deterministic) return;
        __syncwarp();  // every lane has added its part
        turn.ended.arrive_as_warp();
        if (panel == Role::panels - 1) turn_parity ^= 1;
    };
    auto end_dq = [&] {
        if constexpr (!wants_dq) return;
        shared.ds_empty[ds_at.stage].arrive_as_warp();
        ds_at.advance();
    };
    using None = std::integral_constant<int, 0>;
    using One = std::integral_constant<int, 1>;
    constexpr int last = wants_dq ? Role::panels - 1 : 0;
    using Last = std::integral_constant<int, last>;

    shared.keys_full.wait(0);
#pragma unroll 1
    for (int i = 0; i < min(count, 2); ++i) {
        if (i > 0) {
            start_gradient();
            wgmma_wait<0>();
            end_gradient();
        }
        start_next();
        find_operand(None());
        publish();
    }
#pragma unroll 1
    for (int i = 1; i < count - 1; ++i) {
        start_gradient();
        start_dq(0);
        start_next();
        wait_for_dq(One());
        end_gradient();
        add_dq(0);
        if constexpr (last > 0) start_dq(last);
        find_operand(Last());
        wait_for_dq(None());
        end_dq();
        publish();
        if constexpr (last > 0) add_dq(last);
        due.advance();
    }
    start_gradient();
    wgmma_wait<0>();
    end_gradient();
#pragma unroll 1
    for (int i = max(count - 2, 0); wants_dq && i < count; ++i) {
#pragma unroll
        for (int panel = 0; panel < Role::panels; ++panel) {
            start_dq(panel);
            wait_for_dq(None());
            add_dq(panel);
        }
        end_dq();
        due.advance();
    }
    named_barrier_sync(1, consumer_warps * 32);  // nobody reads K and V any more
}

// What a warpgroup has summed, to a head of dV or dK. The warp is found anew, as registers are few before.
template <class Tile, class Columns>
__device__ inline void store_gradient(dtype *shared, const Accumulator<16, Tile::cols> &sum, dtype *global, long long row_stride,
                                      int first_key, int seqlen_k, const Columns &columns) {
    store_keys<Tile>(shared, uniform_warp_index() % 4 * 16, global, row_stride, first_key, min(block_n, seqlen_k - first_key), sum,
                     columns);
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
    Mask mask{p};
    if constexpr (packed) mask.take(work.seqlen_q, work.seqlen_k);
    const int first_key = place.number * block_n, last_key = min(first_key + block_n, work.seqlen_k) - 1;

    const int group_heads = p.num_heads / p.num_heads_k, end_row = min(mask.end_row(last_key), work.seqlen_q);
    const RowTiles tiles{mask.first_row(first_key), end_row, place.head * group_heads, group_heads};
    if ((window || packed) && tiles.count() <= 0) {  // no row sees them
        if (wants_dkv) clear_gradients<Share::num_threads>(work, place.head, first_key, last_key);
        return;
    }

    if (threadIdx.x == 0) {
        shared.q.init(consumer_warps);
        shared.dout.init(consumer_warps);
        for (int warp = 0; warp < 4; ++warp) shared.p_full[warp].init(1), shared.p_empty[warp].init(1);
        for (int stage = 0; stage < 2; ++stage) shared.ds_full[stage].init(4), shared.ds_empty[stage].init(consumer_warps);
        shared.keys_full.init(2);
        if constexpr (deterministic)
            for (Turn &turn : shared.turns) turn.init(4);
        fence_mbarrier_init();
    }
    __syncthreads();  // the barriers are made

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
            const bool of_values = warp_index() == consumer_warps + 2;
            keep_turns(shared.turns, of_values ? 0 : Keys::first_panel, of_values ? Values::panels : dq_turns, workspaces, work, mask,
                       tiles, place.number);
        }
        return;
    }
    take_registers<Share::consumer>();

    if (uniform_warp_index() < 4) {
        Accumulator<16, head_dim_v> dv;
        sum_gradient<Values>(p, workspaces, shared, work, mask, tiles, place.number, dv);
        if constexpr (!wants_dkv) return;
        if constexpr (dropout) scale(dv, Dropout<dropout>{p, work.batch, 0}.rescale);
        store_gradient<VTile>(shared.v, dv, work.like_k(p.dv, p.dv_stride, place.head), p.dv_stride.row, first_key,
                              work.seqlen_k, columns_of_v<narrower>(p));
    } else {
        Accumulator<16, head_dim> dk;
        sum_gradient<Keys>(p, workspaces, shared, work, mask, tiles, place.number, dk);
        if constexpr (!wants_dkv) return;
        scale(dk, p.softmax_scale);
        store_gradient<KTile>(shared.k, dk, work.like_k(p.dk, p.dk_stride, place.head), p.dk_stride.row, first_key,
                              work.seqlen_k, columns_of<narrower>(p));
    }
}

FLASHLADDER_KERNEL(backward_finish, Params, last_pass(finish_threads, QTile::size * sizeof(dtype)));
extern "C" __global__ void __launch_bounds__(finish_threads)
    backward_finish(const __grid_constant__ Params p, const __grid_constant__ CountedWorkspaces workspaces) {
    extern __shared__ __align__(128) char memory[];
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
