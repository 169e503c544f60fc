// The gradients of a tile of keys with up to 256 columns, by wgmma. Three kernels, each launched while the one before still
// runs:
//
//     backward_prepare      delta = rowsum(O dO), lse in log2, zeros for dQ
//     attention_backward    a CTA has a tile of 64 keys, and all rows of Q that see it pass by, 64 at a time
//     backward_finish       dQ, from fp32 sums as warps hold them to rows
//
// The roles of a CTA of attention_backward:
//
//     producers, two threads     have TMA load K, then Q with lse; and V, then dO with delta
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
//     barrier 1    of both warpgroups: nobody reads K and V any more
#include "dq_bulk.cuh"
#include "key_mask.cuh"
#include "padded_pass.cuh"
#include "pipeline/roles.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/reduce.cuh"
#include "query_tile.cuh"
#include "row_pipeline.cuh"
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

FLASHLADDER_KERNEL(backward_prepare, BackwardParams, Launch{pass_threads, 0, block_m});
extern "C" __global__ void __launch_bounds__(pass_threads)
    backward_prepare(const __grid_constant__ BackwardParams p, const __grid_constant__ PaddedWorkspaces workspaces) {
    launch_dependents();
    prepare_tile(p, workspaces);
}

// Adds a warp's part of a panel of dQ to its sums.
__device__ inline void add_panel(float *sums, DqSums &dq) {
    each_block(dq, sums, [](float4 *place, const float (&x)[4]) { add_global_16(place, x); });
}

// The loop of a warpgroup. Leaves its gradient in `sum`.
template <class Role>
__device__ inline void sum_gradient(const BackwardParams &p, const PaddedWorkspaces &workspaces, Shared &shared,
                                    const KeyMask<causal> &mask, QueryTiles next, int batch, int first_key,
                                    Accumulator<16, Role::Columns::cols> &sum) {
    constexpr bool has_values = std::is_same_v<Role, Values>;
    static_assert(Role::panels == 1 || Role::panels == 2, "a panel of dQ before S or dP, and one behind it");
    auto &rows_ring = [&]() -> auto & { if constexpr (has_values) return shared.q; else return shared.dout; }();
    auto &columns_ring = [&]() -> auto & { if constexpr (has_values) return shared.dout; else return shared.q; }();

    const int warp = uniform_warp_index() % 4, warp_key = warp * 16;
    ByRows<typename Role::Stays> keys;
    ByRows<typename Role::Rows> rows;
    ByColumns<typename Role::Columns> columns;
    ByColumns<STile> ds_columns;
    ByColumns<KTile> k_columns[Role::panels];
    keys.start(has_values ? shared.k : shared.v);
    rows.start(rows_ring.tiles[0]);
    columns.start(columns_ring.tiles[0]);
    ds_columns.start(shared.ds[0]);
    for (int i = 0; i < Role::panels; ++i) k_columns[i].start(shared.k, (Role::first_panel + i) * dq_cols);
    HoistedReader<STile, dtype> ds_place;
    ds_place.start(shared.ds[0], warp_key);

    const int count = next.count();
    const float unit = p.softmax_scale * log2_e;
    auto rows_at = rows_ring.consumer();
    auto columns_at = columns_ring.consumer();
    ScoresRing ds_at{0}, ds_put{1};
    PipelineState<1> p_at{has_values};
    QueryTiles due = next;  // whose dQ comes next

    Scores s;
    ScoresOperand operand;
    DqSums dq;
    sum.clear();

    // S^T = K Q^T, or dP^T = V dO^T
    auto start_next = [&] {
        rows_ring.wait(rows_at);
        start_product<dtype, Role::Rows::cols>(s, keys, rows.after(rows_at.stage));
    };
    // dV += P^T dO, or dK += dS^T Q
    auto start_gradient = [&] {
        columns_ring.wait(columns_at);
        start_sum<dtype, step_rows>(sum, operand, columns.after(columns_at.stage));
    };
    // When that is done, nobody here needs the tiles of Q and of dO; they have the same place in their rings.
    auto end_gradient = [&] {
        stay_here(sum);
        stay_here(operand);
        rows_ring.release(columns_at.stage);
        columns_ring.release(columns_at.stage);
        columns_at.advance();
    };
    // P^T of the tile whose S is there, or dS^T of that whose dP is there
    auto find_operand = [&] {
        if constexpr (has_values) {
            mask.hide(s, first_key + warp_key, next.number * block_m);
            probabilities(s, unit, rows_ring.numbers[rows_at.stage]);
        } else {
            each_row_of_q(s, rows_ring.numbers[rows_at.stage], [](float &gradient, float delta) { gradient -= delta; });
            shared.p_full[warp].wait(p_at.parity);
            each_block(s, shared.p[warp], [](const float4 *place, float (&x)[4]) {
                const float4 of = *place;
                x[0] *= of.x, x[1] *= of.y, x[2] *= of.z, x[3] *= of.w;
            });
            __syncwarp();
            shared.p_empty[warp].arrive_as_warp();
            p_at.advance();
        }
        operand = round_to_operand<dtype>(s);
        rows_at.advance();
        next.advance();
    };
    // Gives P^T to the other warpgroup, or dS^T to both.
    auto publish = [&] {
        if constexpr (has_values) {
            shared.p_empty[warp].wait(p_at.parity);
            each_block(s, shared.p[warp], [](float4 *place, const float (&x)[4]) { *place = {x[0], x[1], x[2], x[3]}; });
            __syncwarp();
            shared.p_full[warp].arrive_as_warp();
            p_at.advance();
        } else {
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
        if (panel == 0) shared.ds_full[ds_at.stage].wait(ds_at.parity);
        start_product<dtype, block_n>(dq, ds_columns.after(ds_at.stage), k_columns[panel]);
    };
    auto add_dq = [&](int panel) {
        const long long row = padded_row(p, batch, due.head, due.number);
        add_panel(workspaces.dq_sum + row * head_dim + (Role::first_panel + panel) * panel_sums + warp * warp_sums, dq);
    };
    auto end_dq = [&] {
        shared.ds_empty[ds_at.stage].arrive_as_warp();
        ds_at.advance();
    };

    shared.keys_full.wait(0);
#pragma unroll 1
    for (int i = 0; i < min(count, 2); ++i) {
        if (i > 0) {
            start_gradient();
            wgmma_wait<0>();
            end_gradient();
        }
        start_next();
        wait_for(s);
        find_operand();
        publish();
    }
    constexpr int last = Role::panels - 1;
#pragma unroll 1
    for (int i = 1; i < count - 1; ++i) {
        start_gradient();
        start_dq(0);
        start_next();
        wait_for<1>(dq);
        end_gradient();
        add_dq(0);
        if constexpr (last > 0) start_dq(last);
        wait_for<last>(s);
        find_operand();
        wait_for(dq);
        end_dq();
        publish();
        if constexpr (last > 0) add_dq(last);
        due.advance();
    }
    start_gradient();
    wgmma_wait<0>();
    end_gradient();
#pragma unroll 1
    for (int i = max(count - 2, 0); i < count; ++i) {
#pragma unroll
        for (int panel = 0; panel < Role::panels; ++panel) {
            start_dq(panel);
            wait_for(dq);
            add_dq(panel);
        }
        end_dq();
        due.advance();
    }
    named_barrier_sync(1, consumer_warps * 32);  // nobody reads K and V any more
}

FLASHLADDER_KERNEL(attention_backward, BackwardParams,
                   Launch{Share::num_threads, sizeof(Shared), block_m, block_n}
                       .over("cdiv(seqlen_k, block_n)", "num_heads_k", "batch")
                       .by_tma("q", block_m, 64, 128)
                       .by_tma("dout", block_m, 64, 128)
                       .by_tma("k", block_n, 64, 128)
                       .by_tma("v", block_n, 64, 128)
                       .dependent());
extern "C" __global__ void __launch_bounds__(Share::num_threads, 1)
    attention_backward(const __grid_constant__ BackwardParams p, const __grid_constant__ PaddedWorkspaces workspaces,
                       const __grid_constant__ Maps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);

    launch_dependents();
    const KeyTile<head_dim, causal, 32> tile{p};
    const KeyMask<causal> mask{p};
    const int batch = tile.batch, head_k = tile.head, group_heads = p.num_heads / p.num_heads_k;
    const int first_key = tile.number * block_n, end_key = min(block_n, p.seqlen_k - first_key);

    if (threadIdx.x == 0) {
        shared.q.init(consumer_warps);
        shared.dout.init(consumer_warps);
        for (int warp = 0; warp < 4; ++warp) shared.p_full[warp].init(1), shared.p_empty[warp].init(1);
        for (int place = 0; place < 2; ++place) shared.ds_full[place].init(4), shared.ds_empty[place].init(consumer_warps);
        shared.keys_full.init(2);
        fence_mbarrier_init();
    }
    __syncthreads();  // the barriers are made

    // The tiles of Q of all heads that share the keys, one head behind the other.
    QueryTiles tiles{p, mask.first_row(first_key), head_k * group_heads, group_heads};

    if (warpgroup_index() == 2) {
        release_registers<Share::producer>();
        if (lane_index() != 0) return;

        // Starts loading the tiles of Q or dO, and their numbers.
        auto load_tiles = [&](auto &ring, const TensorMapBytes &map, const float *of_rows) {
            wait_for_dependency();  // lse, delta and the zeros of dQ are there
            auto at = ring.producer();
#pragma unroll 1
            for (int left = tiles.count(); left > 0; --left, tiles.advance(), at.advance())
                ring.load(at, map, tiles.number * block_m, tiles.head, batch,
                          of_rows + padded_row(p, batch, tiles.head, tiles.number));
        };
        if (warp_index() == consumer_warps) {
            load_tile<KTile>(shared.k, maps.k, shared.keys_full, first_key, head_k, batch);
            load_tiles(shared.q, maps.q, workspaces.lse);
        } else if (warp_index() == consumer_warps + 1) {
            load_tile<VTile>(shared.v, maps.v, shared.keys_full, first_key, head_k, batch);
            load_tiles(shared.dout, maps.dout, workspaces.delta);
        }
        return;
    }
    take_registers<Share::consumer>();

    const int warp_key = uniform_warp_index() % 4 * 16;
    if (uniform_warp_index() < 4) {
        Accumulator<16, head_dim_v> dv;
        sum_gradient<Values>(p, workspaces, shared, mask, tiles, batch, first_key, dv);
        store_keys<VTile>(shared.v, warp_key, head_of(p.dv, p.dv_stride, batch, head_k), p.dv_stride.row, first_key, end_key,
                          dv);
    } else {
        Accumulator<16, head_dim> dk;
        sum_gradient<Keys>(p, workspaces, shared, mask, tiles, batch, first_key, dk);
        scale(dk, p.softmax_scale);
        store_keys<KTile>(shared.k, warp_key, head_of(p.dk, p.dk_stride, batch, head_k), p.dk_stride.row, first_key, end_key,
                          dk);
    }
}

FLASHLADDER_KERNEL(backward_finish, BackwardParams, Launch{finish_threads, QTile::size * sizeof(dtype), block_m}.dependent());
extern "C" __global__ void __launch_bounds__(finish_threads)
    backward_finish(const __grid_constant__ BackwardParams p, const __grid_constant__ PaddedWorkspaces workspaces) {
    extern __shared__ __align__(128) char shared[];
    float *sums = workspaces.dq_sum + padded_row(p, blockIdx.z, blockIdx.y, blockIdx.x) * head_dim + warp_index() * warp_sums;
    wait_for_dependency();  // the sums are complete
    finish_tile(p, load_sums<dq_cols>(sums), reinterpret_cast<dtype *>(shared));
}
