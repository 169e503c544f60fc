// Rung 03 with dQ kept, until it is rounded, as warps hold it: an addition of a warp is 128 bytes in a row.
#include "backward.cuh"
#include "dq.cuh"
#include "dq_fragments.cuh"
#include "epilogue/store.cuh"
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

constexpr int shared_bytes = (2 * KTile::size + 2 * QTile::size + STile::size) * sizeof(dtype);

FLASHLADDER_KERNEL(backward_prepare, BackwardParams, pass_launch);
extern "C" __global__ void __launch_bounds__(pass_threads)
    backward_prepare(const __grid_constant__ BackwardParams p, const __grid_constant__ Workspaces workspaces) {
    prepare_row(p, workspaces);
}

FLASHLADDER_KERNEL(attention_backward, BackwardParams,
                   Launch{num_threads, shared_bytes, block_m, block_n}.over("cdiv(seqlen_k, block_n)", "num_heads", "batch"));
extern "C" __global__ void __launch_bounds__(num_threads)
    attention_backward(const __grid_constant__ BackwardParams p, const __grid_constant__ Workspaces workspaces) {
    extern __shared__ __align__(128) char shared[];
    dtype *shared_k = reinterpret_cast<dtype *>(shared), *shared_v = shared_k + KTile::size;
    dtype *shared_q = shared_v + KTile::size, *shared_dout = shared_q + QTile::size;
    dtype *shared_ds = shared_dout + QTile::size;

    const int batch = blockIdx.z, head = blockIdx.y, first_key = blockIdx.x * block_n;
    const long long first_row = (static_cast<long long>(batch) * p.num_heads + head) * p.seqlen_q;  // of all heads' rows
    const dtype *q = head_of(p.q, p.q_stride, batch, head), *dout = head_of(p.dout, p.dout_stride, batch, head);
    const float *lse = p.lse + first_row, *delta = workspaces.delta + first_row;

    const int warp_key = warp_index() * warp_keys;
    const int dq_row = warp_index() % dq_warps * dq_rows, dq_col = warp_index() / dq_warps * dq_cols;
    float *dq_sum = workspaces.dq_sum + first_row * head_dim;

    copy_tile_by_warps<KTile, num_warps>(
        shared_k, head_of(p.k, p.k_stride, batch, head) + first_key * p.k_stride.row, p.k_stride.row);
    copy_tile_by_warps<KTile, num_warps>(
        shared_v, head_of(p.v, p.v_stride, batch, head) + first_key * p.v_stride.row, p.v_stride.row);

    // A operands: a warp's keys. B operands: the tile's rows as they lie, or its columns.
    QOperand<warp_keys, head_dim, 2, BlockReader<KTile, dtype>> k_rows, v_rows;
    KOperand<block_m, head_dim, 2, BlockReader<QTile, dtype, ByRow>> q_rows, dout_rows;
    VOperand<head_dim, block_m, 2, BlockReader<QTile, dtype>> q_columns, dout_columns;
    DSOperand<dq_rows, block_n, ColumnReader<STile, dtype, ByRow>> ds_columns;
    VOperand<dq_cols, block_n, 2, ColumnReader<KTile, dtype>> k_columns;
    k_rows.start(shared_k, warp_key);
    v_rows.start(shared_v, warp_key);
    q_rows.reader.start(shared_q);
    dout_rows.reader.start(shared_dout);
    q_columns.reader.start(shared_q);
    dout_columns.reader.start(shared_dout);
    ds_columns.reader.start(shared_ds, dq_row);
    k_columns.reader.start(shared_k, dq_col);

    Accumulator<warp_keys, head_dim> dk, dv;
    dk.clear();
    dv.clear();

    for (int i = 0; i < p.seqlen_q; i += block_m) {
        __syncthreads();  // every warp has read the previous Q, dO and dS
        copy_tile_by_warps<QTile, num_warps>(shared_q, q + i * p.q_stride.row, p.q_stride.row);
        copy_tile_by_warps<QTile, num_warps>(shared_dout, dout + i * p.dout_stride.row, p.dout_stride.row);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();  // Q and dO are there for every warp, and K and V

        // S^T = K Q^T, dP^T = V dO^T
        Accumulator<warp_keys, block_m> s, dp;
        s.clear();
        dp.clear();
        gemm<dtype, head_dim>(s, k_rows, q_rows);
        gemm<dtype, head_dim>(dp, v_rows, dout_rows);

        // P^T = exp(scale * S^T - lse), dS^T = P^T * (dP^T - delta)
        each_score(s, dp, lse + i, delta + i, [&](float &score, float &gradient, float row_lse, float row_delta) {
            score = __expf(p.softmax_scale * score - row_lse);
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
        add_fragments(dq_sum + i * head_dim, dq);
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
    backward_finish(const __grid_constant__ BackwardParams p, const __grid_constant__ Workspaces workspaces) {
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
