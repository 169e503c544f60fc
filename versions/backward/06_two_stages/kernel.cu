// Rung 05 with two stages of Q and dO: a tile travels while the one before it is computed.
#include "backward.cuh"
#include "dq.cuh"
#include "dq_fragments.cuh"
#include "epilogue/store.cuh"
#include "log2_pass.cuh"
#include "pipeline/copy.cuh"
#include "scores.cuh"
#include "softmax/online.cuh"
#include "tile/gemm.cuh"

using namespace config;

constexpr int warp_keys = 16;
constexpr int num_warps = block_n / warp_keys;
constexpr int num_threads = num_warps * 32;
constexpr int dq_rows = block_m / dq_warps;  // of a warp's part of dQ
constexpr int dq_cols = head_dim / (num_warps / dq_warps);

using QTile = Swizzled<block_m, head_dim>;  // of Q and dO
using KTile = Swizzled<block_n, head_dim>;  // of K and V
using STile = Swizzled<block_n, block_m>;   // of dS^T

constexpr int stage_bytes = 2 * QTile::size * sizeof(dtype);  // Q and dO
constexpr int shared_bytes = (2 * KTile::size + STile::size) * sizeof(dtype) + 2 * stage_bytes;

FLASHLADDER_KERNEL(backward_prepare, BackwardParams, pass_launch);
extern "C" __global__ void __launch_bounds__(pass_threads)
    backward_prepare(const __grid_constant__ BackwardParams p, const __grid_constant__ Log2Workspaces workspaces) {
    prepare_row_log2(p, workspaces);
}

FLASHLADDER_KERNEL(attention_backward, BackwardParams,
                   Launch{num_threads, shared_bytes, block_m, block_n}.over("cdiv(seqlen_k, block_n)", "num_heads", "batch"));
extern "C" __global__ void __launch_bounds__(num_threads)
    attention_backward(const __grid_constant__ BackwardParams p, const __grid_constant__ Log2Workspaces workspaces) {
    extern __shared__ __align__(128) char shared[];
    dtype *shared_k = reinterpret_cast<dtype *>(shared), *shared_v = shared_k + KTile::size;
    dtype *shared_ds = shared_v + KTile::size;
    dtype *shared_q = shared_ds + STile::size, *shared_dout = shared_q + QTile::size;

    const int batch = blockIdx.z, head = blockIdx.y, first_key = blockIdx.x * block_n;
    const long long first_row = (static_cast<long long>(batch) * p.num_heads + head) * p.seqlen_q;  // of all heads' rows
    const dtype *q = head_of(p.q, p.q_stride, batch, head), *dout = head_of(p.dout, p.dout_stride, batch, head);
    const float *lse = workspaces.lse + first_row, *delta = workspaces.delta + first_row;

    const int warp_key = warp_index() * warp_keys;
    const int dq_row = warp_index() % dq_warps * dq_rows, dq_col = warp_index() / dq_warps * dq_cols;
    float *dq_sum = workspaces.dq_sum + first_row * head_dim;

    copy_tile_by_warps<KTile, num_warps>(
        shared_k, head_of(p.k, p.k_stride, batch, head) + first_key * p.k_stride.row, p.k_stride.row);
    copy_tile_by_warps<KTile, num_warps>(
        shared_v, head_of(p.v, p.v_stride, batch, head) + first_key * p.v_stride.row, p.v_stride.row);

    TileCopier<QTile, num_warps, dtype> q_copier, dout_copier;
    q_copier.start(shared_q, q, p.q_stride.row);
    dout_copier.start(shared_dout, dout, p.dout_stride.row);
    q_copier.copy(0);
    dout_copier.copy(0);
    cp_async_commit();

    // A operands: a warp's keys. B operands: the tile's rows as they lie, or its columns.
    QOperand<warp_keys, head_dim, 2, HoistedReader<KTile, dtype>> k_rows, v_rows;
    KOperand<block_m, head_dim, 2, HoistedReader<QTile, dtype, ByRow>> q_rows, dout_rows;
    VOperand<head_dim, block_m, 2, HoistedReader<QTile, dtype>> q_columns, dout_columns;
    DSOperand<dq_rows, block_n, HoistedColumns<STile, dtype, ByRow>> ds_columns;
    VOperand<dq_cols, block_n, 2, HoistedColumns<KTile, dtype>> k_columns;
    k_rows.start(shared_k, warp_key);
    v_rows.start(shared_v, warp_key);
    q_rows.reader.start(shared_q);
    dout_rows.reader.start(shared_dout);
    q_columns.reader.start(shared_q);
    dout_columns.reader.start(shared_dout);
    ds_columns.reader.start(shared_ds, dq_row);
    k_columns.reader.start(shared_k, dq_col);

    const float unit = p.softmax_scale * log2_e;
    Accumulator<warp_keys, head_dim> dk, dv;
    dk.clear();
    dv.clear();

    const int tiles = p.seqlen_q / block_m;
    int to_other_stage = stage_bytes;
    for (int i = 0; i < tiles; ++i) {
        cp_async_wait<0>();
        __syncthreads();  // Q and dO are there for every warp, and every warp has read the other stage and dS
        if (i + 1 < tiles) {
            q_copier.copy(i + 1, to_other_stage);
            dout_copier.copy(i + 1, to_other_stage);
            cp_async_commit();
        }

        // S^T = K Q^T, dP^T = V dO^T
        Accumulator<warp_keys, block_m> s, dp;
        s.clear();
        dp.clear();
        gemm<dtype, head_dim>(s, k_rows, q_rows);
        gemm<dtype, head_dim>(dp, v_rows, dout_rows);

        // P^T = 2^(unit * S^T - lse), dS^T = P^T * (dP^T - delta)
        each_score(s, dp, lse + i * block_m, delta + i * block_m, [&](float &score, float &gradient, float row_lse, float row_delta) {
            score = exp2_approx(unit * score - row_lse);
            gradient = score * (gradient - row_delta);
        });
        auto p_rows = round_to_operand<dtype>(s), ds_rows = round_to_operand<dtype>(dp);
        store_to_shared<STile>(shared_ds, warp_key, dp);

        // dV += P^T dO, dK += dS^T Q
        gemm<dtype, block_m>(dv, p_rows, dout_columns);
        gemm<dtype, block_m>(dk, ds_rows, q_columns);

        __syncthreads();  // dS of every warp is there
        Accumulator<dq_rows, dq_cols> dq;
        dq.clear();
        gemm<dtype, block_n>(dq, ds_columns, k_columns);
        add_fragments(dq_sum + i * QTile::size, dq);

        for (uint32_t *stage : {&q_copier.to, &dout_copier.to, &q_rows.reader.base, &dout_rows.reader.base,
                                &q_columns.reader.base, &dout_columns.reader.base})
            *stage += to_other_stage;
        to_other_stage = -to_other_stage;
    }

    // A warp's rows of K and V are read by other warps until dQ is done.
    __syncthreads();
    scale(dk, p.softmax_scale);
    store_to_shared<KTile>(shared_k, warp_key, dk);
    store_to_shared<KTile>(shared_v, warp_key, dv);
    __syncwarp();
    store_rows<KTile, warp_keys>(
        head_of(p.dk, p.dk_stride, batch, head) + first_key * p.dk_stride.row, p.dk_stride.row, shared_k, warp_key);
    store_rows<KTile, warp_keys>(
        head_of(p.dv, p.dv_stride, batch, head) + first_key * p.dv_stride.row, p.dv_stride.row, shared_v, warp_key);
}

FLASHLADDER_KERNEL(backward_finish, BackwardParams, Launch{num_threads, QTile::size * sizeof(dtype), block_m});
extern "C" __global__ void __launch_bounds__(num_threads)
    backward_finish(const __grid_constant__ BackwardParams p, const __grid_constant__ Log2Workspaces workspaces) {
    extern __shared__ __align__(128) char shared[];
    dtype *shared_dq = reinterpret_cast<dtype *>(shared);
    const int batch = blockIdx.z, head = blockIdx.y, first_row = blockIdx.x * block_m;
    const long long row = (static_cast<long long>(batch) * p.num_heads + head) * p.seqlen_q + first_row;

    auto dq = load_fragments<dq_rows, dq_cols>(workspaces.dq_sum + row * head_dim);
    scale(dq, p.softmax_scale);
    store_block_to_shared<QTile>(
        shared_dq, warp_index() % dq_warps * dq_rows, warp_index() / dq_warps * dq_cols, dq);
    __syncthreads();  // the tile is whole
    store_rows<QTile, block_m / num_warps>(
        head_of(p.dq, p.dq_stride, batch, head) + first_row * p.dq_stride.row, p.dq_stride.row, shared_dq,
        warp_index() * (block_m / num_warps));
}
