// Rung 10's order with Hopper's matrix products: S^T and dP^T have keys as rows, so that a warpgroup keeps P^T and dS^T in
// registers, as operands of the products with dO and Q.
#include "key_mask.cuh"
#include "padded_pass.cuh"
#include "query_tile.cuh"
#include "warpgroup_tiles.cuh"

using namespace config;

constexpr int num_threads = num_groups * warpgroup_threads;
constexpr int num_warps = num_threads / 32;

struct Shared {
    dtype k[KTile::size], v[KTile::size];
    dtype q[2][QTile::size], dout[2][QTile::size];
    dtype ds[2][STile::size];
    RowNumbers<block_m> numbers[2];
};

FLASHLADDER_KERNEL(backward_prepare, BackwardParams, Launch{pass_threads, 0, block_m});
extern "C" __global__ void __launch_bounds__(pass_threads)
    backward_prepare(const __grid_constant__ BackwardParams p, const __grid_constant__ PaddedWorkspaces workspaces) {
    prepare_tile(p, workspaces);
}

// Copies of all threads have landed, and dS of all is stored: products may read them.
__device__ inline void wait_for_copies() {
    cp_async_wait<0>();
    fence_proxy_async();
    __syncthreads();
}

FLASHLADDER_KERNEL(attention_backward, BackwardParams,
                   Launch{num_threads, sizeof(Shared), block_m, block_n}.over("cdiv(seqlen_k, block_n)", "num_heads_k", "batch"));
extern "C" __global__ void __launch_bounds__(num_threads, 1)
    attention_backward(const __grid_constant__ BackwardParams p, const __grid_constant__ PaddedWorkspaces workspaces) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);

    const KeyTile<head_dim, causal> tile{p};
    const KeyMask<causal> mask{p};
    const int batch = tile.batch, head_k = tile.head, group_heads = p.num_heads / p.num_heads_k;
    const int first_key = tile.number * block_n, end_key = min(block_n, p.seqlen_k - first_key);
    const int warp = uniform_warp_index(), warp_key = warp * 16;

    PanelCopier<KTile, num_warps, dtype> k_copier, v_copier;
    k_copier.start(shared.k, head_of(p.k, p.k_stride, batch, head_k), p.k_stride.row);
    v_copier.start(shared.v, head_of(p.v, p.v_stride, batch, head_k), p.v_stride.row);
    k_copier.copy_rows(tile.number, end_key);
    v_copier.copy_rows(tile.number, end_key);

    // The tiles of Q of all heads that share the keys, one head behind the other.
    QueryTiles tiles{p, mask.first_row(first_key), head_k * group_heads, group_heads};
    QueryTiles next = tiles;
    auto copy = [&](int i) {
        const int rows = p.seqlen_q - next.number * block_m;
        const long long padded = padded_row(p, batch, next.head, next.number);
        PanelCopier<QTile, num_warps, dtype> q_copier, dout_copier;
        q_copier.start(shared.q[i % 2], head_of(p.q, p.q_stride, batch, next.head), p.q_stride.row);
        dout_copier.start(shared.dout[i % 2], head_of(p.dout, p.dout_stride, batch, next.head), p.dout_stride.row);
        q_copier.copy_rows(next.number, rows);
        dout_copier.copy_rows(next.number, rows);
        shared.numbers[i % 2].copy(workspaces.lse + padded, workspaces.delta + padded);
        cp_async_commit();
        next.advance();
    };
    copy(0);

    const DqPart part{warp / 4};
    ByRows<KTile> keys, values;
    ByRows<QTile> q_rows, dout_rows;
    ByColumns<QTile> q_columns, dout_columns;
    ByColumns<STile> ds_columns;
    ByColumns<KTile> k_columns;
    keys.start(shared.k, warp_key);
    values.start(shared.v, warp_key);
    q_rows.start(shared.q[0]);
    dout_rows.start(shared.dout[0]);
    q_columns.start(shared.q[0]);
    dout_columns.start(shared.dout[0]);
    ds_columns.start(shared.ds[0], part.row);
    k_columns.start(shared.k, part.col);
    HoistedReader<STile, dtype> ds_place;
    ds_place.start(shared.ds[0], warp_key);

    const float unit = p.softmax_scale * log2_e;
    Accumulator<16, head_dim> dv, dk;  // of this warp
    dv.clear();
    dk.clear();

    // dQ = dS K of tile i, once every warp has stored its dS
    auto add_dq = [&](int i, const QueryTiles &at) {
        Accumulator<16, dq_cols> dq;
        start_product<dtype, block_n>(dq, ds_columns.after(i % 2), k_columns);
        wait_for(dq);
        add_fragments(workspaces.dq_sum + padded_row(p, batch, at.head, at.number) * head_dim, dq);
    };

    const int count = tiles.count();
    QueryTiles before = tiles;
    for (int i = 0; i < count; ++i) {
        wait_for_copies();  // Q, dO and the previous dS are there, and every warp has read the other stages
        if (i + 1 < count) copy(i + 1);
        if (i > 0) add_dq(i - 1, before);

#pragma unroll
        for (int row = 0; row < block_m; row += step_rows) {
            // S^T = K Q^T, dP^T = V dO^T
            Scores s, dp;
            start_product<dtype, head_dim>(s, keys, q_rows.after(i % 2).below(row));
            start_product<dtype, head_dim>(dp, values, dout_rows.after(i % 2).below(row));
            wait_for<1>(s);
            mask.hide(s, first_key + warp_key, tiles.number * block_m + row);
            probabilities(s, unit, shared.numbers[i % 2].lse + row);

            // dV += P^T dO
            auto p_rounded = round_to_operand<dtype>(s);
            start_sum<dtype, step_rows>(dv, p_rounded, dout_columns.after(i % 2).below(row));

            // dK += dS^T Q
            wait_for<1>(dp);
            score_gradients(dp, s, shared.numbers[i % 2].delta + row);
            auto ds = round_to_operand<dtype>(dp);
            store_scores(ds_place, i % 2, row, ds);
            start_sum<dtype, step_rows>(dk, ds, q_columns.after(i % 2).below(row));
            wait_for(dk, ds);
            stay_here(dv);
        }
        before = tiles;
        tiles.advance();
    }

    fence_proxy_async();
    __syncthreads();  // the last dS is there
    add_dq(count - 1, before);

    __syncthreads();  // every warp has read K
    scale(dk, p.softmax_scale);
    store_keys(shared.v, warp_key, head_of(p.dv, p.dv_stride, batch, head_k), p.dv_stride.row, first_key, end_key, dv);
    store_keys(shared.k, warp_key, head_of(p.dk, p.dk_stride, batch, head_k), p.dk_stride.row, first_key, end_key, dk);
}

FLASHLADDER_KERNEL(backward_finish, BackwardParams, Launch{finish_threads, QTile::size * sizeof(dtype), block_m});
extern "C" __global__ void __launch_bounds__(finish_threads)
    backward_finish(const __grid_constant__ BackwardParams p, const __grid_constant__ PaddedWorkspaces workspaces) {
    extern __shared__ __align__(128) char shared[];
    const long long row = padded_row(p, blockIdx.z, blockIdx.y, blockIdx.x);
    finish_tile(p, load_fragments<16, dq_cols>(workspaces.dq_sum + row * head_dim), reinterpret_cast<dtype *>(shared));
}
