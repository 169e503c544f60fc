// Rung 16 with the same bits each time: the tiles of keys are added to a tile of dQ one after the other, in one order.
#include "dq_bulk.cuh"
#include "key_mask.cuh"
#include "padded_pass.cuh"
#include "pipeline/roles.cuh"
#include "query_tile.cuh"
#include "row_pipeline.cuh"
#include "turns.cuh"
#include "warpgroup_tiles.cuh"

#include <type_traits>

using namespace config;

using Share = Registers<num_groups, 1, 24>;  // the producer's warpgroup is the last one

using DqSums = Accumulator<16, dq_cols>;  // of a warp, of a tile
constexpr int warp_sums = 16 * dq_cols;
constexpr int num_parts = num_groups * 4;  // of a tile of dQ: one a warp

struct CountedWorkspaces : PaddedWorkspaces {
    unsigned *added;  // of each part of dQ: tiles of keys
};
FLASHLADDER_WORKSPACE(added, unsigned, "batch * num_heads * cdiv(seqlen_q, block_m) * (block_n // 16)");

// The first part of a tile among those of all heads.
__device__ inline int first_part(long long padded_row) { return padded_row / (block_m / num_parts); }
__device__ inline float *sums_of(const CountedWorkspaces &workspaces, int part) {
    return workspaces.dq_sum + static_cast<long long>(part) * warp_sums;
}

// The additions of a warp to its parts of dQ, one after the other.
struct Additions {
    const CountedWorkspaces &workspaces;
    int &last;  // to which part the last one was started, -1: none; in shared memory, as registers are scarce

    // The last one is done, and whoever waits for it may add.
    __device__ void end() {
        if (lane_index() != 0 || last < 0) return;
        tma_store_wait();
        add_release(workspaces.added + last, 1);
    }
    // Starts the next one, when so many tiles of keys have been added.
    __device__ void start(int part, int tiles, float *staged, DqSums &dq) {
        end();
        if (lane_index() == 0) {
            last = part;
            wait_until_added(workspaces.added + part, tiles);
        }
        start_adding(sums_of(workspaces, part), staged, dq);
    }
};

struct Maps { TensorMapBytes q, dout, k, v; };
struct Shared {
    dtype k[KTile::size], v[KTile::size];
    dtype ds[2][STile::size];
    RowPipeline<QTile, dtype, 2> q, dout;
    float dq[num_parts][warp_sums];  // of each warp, on its way
    int last_added[num_parts];  // of each warp
    Mbarrier keys_full;  // K and V have come
};

FLASHLADDER_KERNEL(backward_prepare, BackwardParams, Launch{pass_threads, 0, block_m});
extern "C" __global__ void __launch_bounds__(pass_threads)
    backward_prepare(const __grid_constant__ BackwardParams p, const __grid_constant__ CountedWorkspaces workspaces) {
    prepare_tile(p, workspaces);
    const int part = first_part(padded_row(p, blockIdx.z, blockIdx.y, blockIdx.x));
    if (threadIdx.x < num_parts) workspaces.added[part + threadIdx.x] = 0;
}

FLASHLADDER_KERNEL(attention_backward, BackwardParams,
                   Launch{Share::num_threads, sizeof(Shared), block_m, block_n}
                       .over("cdiv(seqlen_k, block_n)", "num_heads_k", "batch")
                       .by_tma("q", block_m, 64, 128)
                       .by_tma("dout", block_m, 64, 128)
                       .by_tma("k", block_n, 64, 128)
                       .by_tma("v", block_n, 64, 128));
extern "C" __global__ void __launch_bounds__(Share::num_threads, 1)
    attention_backward(const __grid_constant__ BackwardParams p, const __grid_constant__ CountedWorkspaces workspaces,
                       const __grid_constant__ Maps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);

    const KeyMask<causal> mask{p};
    const int key_tile = tile_from_the_end(), head_k = blockIdx.y, batch = blockIdx.z;
    const int group_heads = p.num_heads / p.num_heads_k;
    const int first_key = key_tile * block_n, end_key = min(block_n, p.seqlen_k - first_key);

    if (threadIdx.x < num_parts) shared.last_added[threadIdx.x] = -1;
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
        auto at = shared.q.producer();  // dO is at the same place
#pragma unroll 1
        for (int i = 0; i < count; ++i, tiles.advance(), at.advance()) {
            const int row = tiles.number * block_m;
            const long long padded = padded_row(p, batch, tiles.head, tiles.number);
            shared.q.load(at, maps.q, row, tiles.head, batch, workspaces.lse + padded);
            shared.dout.load(at, maps.dout, row, tiles.head, batch, workspaces.delta + padded);
        }
        return;
    }
    take_registers<Share::consumer>();

    const int warp = uniform_warp_index(), warp_key = warp * 16;
    const DqPart part{warp / 4};
    ByRows<KTile> keys, values;
    ByRows<QTile> q_rows, dout_rows;
    ByColumns<QTile> q_columns, dout_columns;
    ByColumns<STile> ds_columns;
    ByColumns<KTile> k_columns;
    keys.start(shared.k, warp_key);
    values.start(shared.v, warp_key);
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

    // The previous dS of all warps is there.
    auto wait_for_ds = [] {
        fence_proxy_async();
        named_barrier_sync(1, num_groups * warpgroup_threads);
    };
    // dQ = dS K of a tile
    auto start_dq = [&](DqSums &dq, int stage) {
        start_product<dtype, block_n>(dq, ds_columns.after(stage), k_columns);
    };

    auto at = shared.q.consumer();  // dO is at the same place, and dS
    QueryTiles before = tiles;

    Additions additions{workspaces, shared.last_added[warp]};
    auto add_dq = [&](DqSums &dq) {
        const int part = first_part(padded_row(p, batch, before.head, before.number)) + warp;
        additions.start(part, tiles_before(mask, key_tile, before.number), shared.dq[warp], dq);
    };

    // A step. dK of the step before is under way when it begins; if that one ended a tile, its dQ is due.
    auto attend = [&](int row, auto after_tile) {
        constexpr bool ends_tile = decltype(after_tile)::value;

        // S^T = K Q^T, and dQ of the tile before
        Scores s, dp;
        DqSums dq;
        start_product<dtype, head_dim>(s, keys, q_rows.after(at.stage).below(row));
        wait_for<1>(dk);
        if constexpr (ends_tile) {
            __syncwarp();  // every lane has read lse and delta
            shared.dout.release(at.stage ^ 1);
            shared.q.release(at.stage ^ 1);
            wait_for_ds();
            start_dq(dq, at.stage ^ 1);
        }
        wait_for<ends_tile>(s);
        mask.hide(s, first_key + warp_key, tiles.number * block_m + row);
        probabilities(s, unit, shared.q.numbers[at.stage] + row);

        // dV += P^T dO
        auto p_rounded = round_to_operand<dtype>(s);
        shared.dout.wait(at);
        start_sum<dtype, step_rows>(dv, p_rounded, dout_columns.after(at.stage).below(row));
        if constexpr (ends_tile) {
            wait_for<1>(dq);
            add_dq(dq);
        }

        // dP^T = V dO^T, dK += dS^T Q
        start_product<dtype, head_dim>(dp, values, dout_rows.after(at.stage).below(row));
        wait_for(dv, p_rounded);
        stay_here(dp);
        score_gradients<dtype>(dp, p_rounded, shared.dout.numbers[at.stage] + row);
        auto ds = round_to_operand<dtype>(dp);
        store_scores(ds_place, at.stage, row, ds);
        start_sum<dtype, step_rows>(dk, ds, q_columns.after(at.stage).below(row));
    };
    auto attend_tile = [&](auto after_tile) {
        shared.q.wait(at);
        attend(0, after_tile);
#pragma unroll
        for (int row = step_rows; row < block_m; row += step_rows) attend(row, std::false_type{});
        before = tiles;
        tiles.advance();
        at.advance();
    };

    shared.keys_full.wait(0);
    attend_tile(std::false_type{});
    for (int left = count - 1; left > 0; --left) attend_tile(std::true_type{});

    wait_for(dk);  // which leaves registers for dQ
    wait_for_ds();
    DqSums dq;
    start_dq(dq, at.stage ^ 1);
    wait_for(dq);
    add_dq(dq);

    named_barrier_sync(1, num_groups * warpgroup_threads);  // every warp has read K
    scale(dk, p.softmax_scale);
    store_keys(shared.v, warp_key, head_of(p.dv, p.dv_stride, batch, head_k), p.dv_stride.row, first_key, end_key, dv);
    additions.end();
    store_keys(shared.k, warp_key, head_of(p.dk, p.dk_stride, batch, head_k), p.dk_stride.row, first_key, end_key, dk);
}

FLASHLADDER_KERNEL(backward_finish, BackwardParams, Launch{finish_threads, QTile::size * sizeof(dtype), block_m});
extern "C" __global__ void __launch_bounds__(finish_threads)
    backward_finish(const __grid_constant__ BackwardParams p, const __grid_constant__ CountedWorkspaces workspaces) {
    extern __shared__ __align__(128) char shared[];
    const int part = first_part(padded_row(p, blockIdx.z, blockIdx.y, blockIdx.x)) + warp_index();
    finish_tile(p, load_sums<dq_cols>(sums_of(workspaces, part)), reinterpret_cast<dtype *>(shared));
}
