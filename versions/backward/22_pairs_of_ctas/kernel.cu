// The gradients of a tile of keys with up to 256 columns, by wgmma, where two CTAs share dQ. Three kernels, each launched
// while the one before still runs:
//
//     backward_prepare      delta = rowsum(O dO), lse in log2, zeros for dQ
//     attention_backward    a CTA has a tile of 64 keys, a cluster two. All rows of Q that see one pass by, 64 at a time
//     backward_finish       dQ, from fp32 sums as warps hold them to rows
//
// The roles of a CTA of attention_backward:
//
//     producers, two threads     have TMA load K and the other CTA's, then Q with lse; and V, then dO with delta. Each CTA
//                                loads half of the rows of Q and dO for both
//     warpgroup 0, "values"      S^T = K Q^T, P^T;      dV += P^T dO;   a panel of dQ = dS K
//     warpgroup 1, "keys"        dP^T = V dO^T, dS^T;   dK += dS^T Q;   another one
//
// A panel is of the keys of both CTAs; of three panels both add to the one amid, each for its own keys. A step:
//
//     values   dV(i)  S(i+1)               dQ(i)   P(i+1) -+
//     keys     dK(i)  dP(i+1)  sends dS(i)  dQ(i)           +-> dS(i+1)
//
// P comes where dS of the tile before was, in both places of dS, and dS where P was. The barriers:
//
//     q, dout      full: TMA has brought the tile and its numbers. empty: no warpgroup of either CTA needs it
//     keys_full    K, V and the other CTA's part of K have come
//     ds_empty     both warpgroups have multiplied dS by K: P may come
//     p_full       of each warp of `keys`: the warp of `values` with the same keys has put P^T there
//     peer_empty   of each warp of `keys`: that of the other CTA has read its P^T, in whose place dS^T may be sent
//     ds_full      all warps of `keys` of both CTAs have put dS^T there
//     barrier 1    of both warpgroups: nobody reads K and V any more
#include "cluster_rows.cuh"
#include "dq_bulk.cuh"
#include "key_mask.cuh"
#include "padded_pass.cuh"
#include "pipeline/roles.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/reduce.cuh"
#include "query_tile.cuh"
#include "warpgroup_tiles.cuh"

#include <type_traits>

using namespace config;

using Share = Registers<2, 1, 24>;  // the producer's warpgroup is the last one
constexpr int consumer_warps = 8;
constexpr int ctas = 2;  // of a cluster

using VTile = SwizzledPanels<block_n, head_dim_v>;
using DoutTile = SwizzledPanels<block_m, head_dim_v>;
using QRing = ClusterRows<QTile, dtype, num_stages, ctas>;
using DoutRing = ClusterRows<DoutTile, dtype, num_stages, ctas>;
constexpr int peer_panels = QTile::panels / 2;  // of dQ that a CTA has for the keys of both
using PeerTile = SwizzledPanels<block_n, peer_panels * dq_cols>;  // of the other CTA's K
constexpr int warp_ds = 16 * block_m;  // of a tile of dS

using DqSums = Accumulator<16, dq_cols>;  // of a warp, of a panel
constexpr int warp_sums = 16 * dq_cols;
constexpr int panel_sums = block_m * dq_cols;

struct Maps { TensorMapBytes q, dout, k, v; };
struct Shared {
    dtype k[KTile::size], v[VTile::size], peer_k[PeerTile::size];
    dtype ds[2][STile::size];  // of this CTA, and of the other one; before that P
    QRing q;
    DoutRing dout;
    Mbarrier p_full[4], peer_empty[4];
    Mbarrier ds_full, ds_empty;
    Mbarrier keys_full;
};

// What a warpgroup multiplies: a tile that stays by the rows of one that passes, and what comes of it by the columns of
// the other one. And which panel of dQ it has, and whether for the keys of both CTAs.
struct Values {
    using Stays = KTile;
    using Rows = QTile;
    using Columns = DoutTile;
    static constexpr bool has_all_keys = true;
    __device__ static int panel(int rank) { return 2 * rank; }
};
struct Keys {
    using Stays = VTile;
    using Rows = DoutTile;
    using Columns = QTile;
    static constexpr bool has_all_keys = peer_panels == 2;
    __device__ static int panel(int rank) { return has_all_keys ? 2 * rank + 1 : 1; }
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

// Visits P^T of a warp with a lane's places for it: half of them in either tile of dS, where the warp's dS comes.
template <class Visit>
__device__ inline void each_letter(Shared &shared, int warp, Scores &s, Visit visit) {
#pragma unroll
    for (int n = 0; n < step_rows / 8; ++n)
        visit(reinterpret_cast<float4 *>(shared.ds[n / 4] + warp * warp_ds) + n % 4 * 32 + lane_index(), s.block[0][n]);
}

// The loop of a warpgroup. Leaves its gradient in `sum`.
template <class Role>
__device__ inline void sum_gradient(const BackwardParams &p, const PaddedWorkspaces &workspaces, Shared &shared,
                                    const KeyMask<causal> &mask, QueryTiles next, int batch, int first_key,
                                    Accumulator<16, Role::Columns::cols> &sum) {
    constexpr bool has_values = std::is_same_v<Role, Values>;
    auto &rows_ring = [&]() -> auto & { if constexpr (has_values) return shared.q; else return shared.dout; }();
    auto &columns_ring = [&]() -> auto & { if constexpr (has_values) return shared.dout; else return shared.q; }();

    const int warp = uniform_warp_index() % 4, warp_key = warp * 16, rank = cluster_rank();
    const int panel = Role::panel(rank);
    ByRows<typename Role::Stays> keys;
    ByRows<typename Role::Rows> rows;
    ByColumns<typename Role::Columns> columns;
    ByColumns<STile> ds, peer_ds;
    ByColumns<KTile> k_panel;
    ByColumns<PeerTile> peer_panel;
    const Shared &own = *without_rank(&shared);
    const auto &own_rows = [&]() -> auto & { if constexpr (has_values) return own.q; else return own.dout; }();
    const auto &own_columns = [&]() -> auto & { if constexpr (has_values) return own.dout; else return own.q; }();
    keys.start(has_values ? own.k : own.v);
    rows.start(own_rows.tiles[0]);
    columns.start(own_columns.tiles[0]);
    ds.start(own.ds[0]);
    peer_ds.start(own.ds[1]);
    k_panel.start(own.k, panel * dq_cols);
    peer_panel.start(own.peer_k, has_values ? 0 : dq_cols);
    HoistedReader<STile, dtype> ds_place;
    ds_place.start(shared.ds[0], warp_key);

    const int count = next.count();
    const float unit = p.softmax_scale * log2_e;
    auto rows_at = rows_ring.consumer();
    auto columns_at = columns_ring.consumer();
    PipelineState<1> ds_at{0}, ds_put{1}, p_at{0}, peer_at{0};
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
            each_letter(shared, warp, s, [](const float4 *place, float (&x)[4]) {
                const float4 of = *place;
                x[0] *= of.x, x[1] *= of.y, x[2] *= of.z, x[3] *= of.w;
            });
            __syncwarp();
            if (lane_index() == 0) arrive_at(shared.peer_empty[warp], rank ^ 1);
            p_at.advance();
        }
        operand = round_to_operand<dtype>(s);
        rows_at.advance();
        next.advance();
    };
    // Gives P^T to the other warpgroup, or dS^T to both.
    auto publish = [&] {
        if constexpr (has_values) {
            shared.ds_empty.wait(ds_put.parity);
            ds_put.advance();
            each_letter(shared, warp, s, [](float4 *place, const float (&x)[4]) { *place = {x[0], x[1], x[2], x[3]}; });
            __syncwarp();
            shared.p_full[warp].arrive_as_warp();
        } else {
            store_scores(ds_place, 0, 0, operand);
            fence_proxy_async();
            __syncwarp();
            shared.ds_full.arrive_as_warp();
        }
    };
    // Gives dS^T to the other CTA.
    auto send = [&] {
        if constexpr (!has_values) {
            wait_for_cluster(shared.peer_empty[warp], peer_at.parity);
            peer_at.advance();
            const uint32_t here = shared_address(shared.ds[0] + warp * warp_ds) + lane_index() * 16;
            const uint32_t there = in_cta(here + sizeof shared.ds[0], rank ^ 1);
#pragma unroll
            for (int i = 0; i < 4; ++i) store_cluster_16(there + i * 512, load_shared_16(here + i * 512));
            fence_proxy_async_cluster();
            __syncwarp();
            if (lane_index() == 0) arrive_at(shared.ds_full, rank ^ 1);
        }
    };
    // A panel of dQ = dS K, of the keys of both CTAs
    auto start_dq = [&] {
        wait_for_cluster(shared.ds_full, ds_at.parity);
        ds_at.advance();
        start_product<dtype, block_n>(dq, ds, k_panel);
        if constexpr (Role::has_all_keys) start_product<dtype, block_n>(dq, peer_ds, peer_panel, true);
    };
    auto end_dq = [&] { shared.ds_empty.arrive_as_warp(); };
    auto add_dq = [&] {
        const long long row = padded_row(p, batch, due.head, due.number);
        add_panel(workspaces.dq_sum + row * head_dim + panel * panel_sums + warp * warp_sums, dq);
        due.advance();
    };

    shared.keys_full.wait(0);
    start_next();
    wait_for(s);
    find_operand();
    publish();
#pragma unroll 1
    for (int left = count - 1; left > 0; --left) {
        start_gradient();
        start_next();
        send();
        wait_for<1>(sum);
        end_gradient();
        start_dq();
        if constexpr (has_values) {
            wait_for<2>(s);
            find_operand();
            wait_for(dq);
            end_dq();
            publish();
            add_dq();
        } else {
            wait_for(dq);
            stay_here(s);
            end_dq();
            add_dq();
            find_operand();
            publish();
        }
    }
    start_gradient();
    send();
    start_dq();
    wait_for(dq);
    stay_here(sum);
    add_dq();
    named_barrier_sync(1, consumer_warps * 32);  // nobody reads K and V any more
}

FLASHLADDER_KERNEL(attention_backward, BackwardParams,
                   Launch{Share::num_threads, sizeof(Shared), block_m, block_n}
                       .over("2 * cdiv(seqlen_k, 2 * block_n)", "num_heads_k", "batch")
                       .clusters(ctas)
                       .by_tma("q", QRing::rows, 64, 128)
                       .by_tma("dout", DoutRing::rows, 64, 128)
                       .by_tma("k", block_n, 64, 128)
                       .by_tma("v", block_n, 64, 128)
                       .dependent());
extern "C" __global__ void __launch_bounds__(Share::num_threads, 1)
    attention_backward(const __grid_constant__ BackwardParams p, const __grid_constant__ PaddedWorkspaces workspaces,
                       const __grid_constant__ Maps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);

    launch_dependents();
    const KeyTile<head_dim, causal, 32, true, ctas> tile{p};
    const KeyMask<causal> mask{p};
    const int batch = tile.batch, head_k = tile.head, group_heads = p.num_heads / p.num_heads_k;
    const int first_key = tile.number * block_n, end_key = min(block_n, p.seqlen_k - first_key);

    if (threadIdx.x == 0) {
        shared.q.init(consumer_warps);
        shared.dout.init(consumer_warps);
        for (int warp = 0; warp < 4; ++warp) shared.p_full[warp].init(1), shared.peer_empty[warp].init(1);
        shared.ds_full.init(4 * ctas);
        shared.ds_empty.init(consumer_warps);
        shared.keys_full.init(3);
        fence_mbarrier_init();
    }
    cluster_sync();  // the barriers are made

    // The tiles of Q of all heads that share the keys, one head behind the other; those of the first CTA of a cluster.
    const int first_row = mask.first_row(tile.number / ctas * ctas * block_n);
    QueryTiles tiles{p, first_row, head_k * group_heads, group_heads};

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
            load_tile<PeerTile>(shared.peer_k, maps.k, shared.keys_full, (tile.number ^ 1) * block_n, head_k, batch,
                                cluster_rank() * 2 * dq_cols);
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
    cluster_sync();  // the other CTA tells this one until then what is empty
}

FLASHLADDER_KERNEL(backward_finish, BackwardParams, Launch{finish_threads, QTile::size * sizeof(dtype), block_m}.dependent());
extern "C" __global__ void __launch_bounds__(finish_threads)
    backward_finish(const __grid_constant__ BackwardParams p, const __grid_constant__ PaddedWorkspaces workspaces) {
    extern __shared__ __align__(128) char shared[];
    float *sums = workspaces.dq_sum + padded_row(p, blockIdx.z, blockIdx.y, blockIdx.x) * head_dim + warp_index() * warp_sums;
    wait_for_dependency();  // the sums are complete
    finish_tile(p, load_sums<dq_cols>(sums), reinterpret_cast<dtype *>(shared));
}
