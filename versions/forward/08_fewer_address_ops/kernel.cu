// Rung 07 with less address arithmetic: copies step down the tile by constants, and each swizzle is worked out once.
#include "config.cuh"
#include "epilogue/store.cuh"
#include "pipeline/copy.cuh"
#include "schedule/query_block.cuh"
#include "softmax/online.cuh"
#include "tile/gemm.cuh"

using namespace config;

constexpr int num_threads = num_warps * 32;
constexpr int warp_rows = block_m / num_warps;
constexpr int buffers = double_buffer ? 2 : 1;

using QTile = Swizzled<block_m, head_dim>;
using KVTile = Swizzled<block_n, head_dim>;

FLASHLADDER_LAUNCH(num_threads, (QTile::size + 2 * KVTile::size) * sizeof(dtype), block_m, block_n);

extern "C" __global__ void __launch_bounds__(num_threads)
    attention_forward(const __grid_constant__ AttentionParams params) {
    extern __shared__ __align__(128) char shared[];
    dtype *shared_q = reinterpret_cast<dtype *>(shared);
    dtype *shared_k = shared_q + QTile::size;
    dtype *shared_v = shared_k + KVTile::size;

    const QueryBlock<dtype, block_m> block{params};
    const int warp_row = warp_index() * warp_rows;

    copy_tile<QTile, num_warps>(shared_q, block.q(), params.q_stride.row);
    cp_async_commit();
    TileCopier<KVTile, num_warps, dtype> k_copier, v_copier;
    k_copier.start(shared_k, block.k(), params.k_stride.row);
    v_copier.start(shared_v, block.v(), params.v_stride.row);
    k_copier.copy(0);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();  // Q is there for every warp

    QOperand<warp_rows, head_dim, q_fragments, HoistedReader<QTile, dtype>, buffers> q_operand;
    KOperand<block_n, head_dim, k_fragments, HoistedReader<KVTile, dtype>, buffers> k_operand;
    VOperand<head_dim, block_n, v_fragments, HoistedReader<KVTile, dtype>, buffers> v_operand;
    q_operand.start(shared_q, warp_row);
    k_operand.reader.start(shared_k);
    v_operand.reader.start(shared_v);

    Accumulator<warp_rows, head_dim> o;
    OnlineSoftmax<warp_rows> softmax{params.softmax_scale * log2_e};
    o.clear();
    softmax.clear();

    const int blocks = params.seqlen_k / block_n;
    for (int j = 0; j < blocks; ++j) {
        cp_async_wait<0>();
        __syncthreads();  // K is there for every warp, and every warp has read the previous V
        v_copier.copy(j);
        cp_async_commit();

        // S = Q K^T
        Accumulator<warp_rows, block_n> s;
        s.clear();
        gemm<dtype, head_dim, double_buffer>(s, q_operand, k_operand);

        cp_async_wait<0>();
        __syncthreads();  // V is there for every warp, and every warp has read K
        if (j + 1 < blocks) {
            k_copier.copy(j + 1);
            cp_async_commit();
        }

        // P = 2^(unit * S - m); O and l follow the new m
        softmax.update(s, o);

        // O += P V
        auto p = round_to_operand<dtype>(s);
        gemm<dtype, block_n, double_buffer>(o, p, v_operand);
    }

    softmax.finish(o);
    if (params.lse != nullptr) softmax.store_lse(block.lse() + warp_row);

    // A warp's rows of Q are read by that warp alone, so it may put its rows of O in their place.
    store_to_shared<QTile>(shared_q, warp_row, o);
    __syncwarp();
    store_rows<QTile, warp_rows>(block.o(), params.o_stride.row, shared_q, warp_row);
}
