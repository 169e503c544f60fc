// FlashAttention-1's order of the two loops, with the parts of rung 01: a block of K and V stays, Q passes by. A row of O
// is right for the keys seen so far, so every block of keys changes it: O and lse travel to global memory and back.
#include "config.cuh"
#include "epilogue/store.cuh"
#include "pipeline/copy.cuh"
#include "schedule/query_block.cuh"
#include "softmax/online.cuh"
#include "tile/gemm.cuh"

using namespace config;

constexpr int num_threads = num_warps * 32;
constexpr int warp_rows = block_m / num_warps;
constexpr int every_row = 1 << 30;  // one CTA has a whole head: the rows of O have no other owner

using QTile = RowMajor<block_m, head_dim>;
using KVTile = RowMajor<block_n, head_dim>;

FLASHLADDER_LAUNCH(num_threads, (QTile::size + 2 * KVTile::size) * sizeof(dtype), every_row, block_n);

// What earlier blocks of keys left of a warp's rows: O, divided by its sum, and the log-sum-exp.
__device__ void resume(OnlineSoftmax<warp_rows> &softmax, Accumulator<warp_rows, head_dim> &o, const dtype *global_o,
                       long long row_stride, const float *global_lse) {
#pragma unroll
    for (int b = 0; b < warp_rows / 16; ++b)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = b * 16 + h * 8 + accumulator_row();
            const float lse = lane_index() % 4 == 0 ? global_lse[row] : 0.0f;
            softmax.m[b][h] = __shfl_sync(0xffffffff, lse, lane_index() / 4 * 4) * log2_e;
            softmax.l[b][h] = 0.25f;  // a quarter of the sum 1
#pragma unroll
            for (int n = 0; n < head_dim / 8; ++n) {
                const dtype *pair = global_o + row * row_stride + n * 8 + accumulator_col();
                const uint32_t bits = *reinterpret_cast<const uint32_t *>(pair);
                o.block[b][n][2 * h] = static_cast<float>(reinterpret_cast<const dtype *>(&bits)[0]);
                o.block[b][n][2 * h + 1] = static_cast<float>(reinterpret_cast<const dtype *>(&bits)[1]);
            }
        }
}

extern "C" __global__ void __launch_bounds__(num_threads)
    attention_forward(const __grid_constant__ AttentionParams params) {
    extern __shared__ __align__(128) char shared[];
    dtype *shared_q = reinterpret_cast<dtype *>(shared);
    dtype *shared_k = shared_q + QTile::size;
    dtype *shared_v = shared_k + KVTile::size;

    const QueryBlock<dtype, block_m> head{params};
    const int warp_row = warp_index() * warp_rows;

    for (int j = 0; j < params.seqlen_k / block_n; ++j) {
        __syncthreads();  // every warp has read the previous K and V
        copy_tile_by_warps<KVTile, num_warps>(shared_k, head.k() + j * block_n * params.k_stride.row, params.k_stride.row);
        copy_tile_by_warps<KVTile, num_warps>(shared_v, head.v() + j * block_n * params.v_stride.row, params.v_stride.row);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();  // K and V are there for every warp

        for (int i = 0; i < params.seqlen_q / block_m; ++i) {
            dtype *global_o = head.o() + i * block_m * params.o_stride.row;
            float *global_lse = head.lse() + i * block_m + warp_row;

            __syncwarp();  // the warp has stored the previous O, which lies where its rows of Q go
            copy_tile_by_warps<QTile, num_warps>(shared_q, head.q() + i * block_m * params.q_stride.row, params.q_stride.row);
            cp_async_commit();
            cp_async_wait<0>();
            __syncwarp();  // a warp reads only the rows of Q that it copied itself

            QOperand<warp_rows, head_dim, 0, BlockReader<QTile, dtype>> q_operand;
            KOperand<block_n, head_dim, 0, BlockReader<KVTile, dtype>> k_operand;
            VOperand<head_dim, block_n, 0, BlockReader<KVTile, dtype>> v_operand;
            q_operand.start(shared_q, warp_row);
            k_operand.reader.start(shared_k);
            v_operand.reader.start(shared_v);

            Accumulator<warp_rows, head_dim> o;
            OnlineSoftmax<warp_rows> softmax{1.0f};  // S is brought to log2 units before
            if (j == 0) {
                o.clear();
                softmax.clear();
            } else {
                resume(softmax, o, global_o + warp_row * params.o_stride.row, params.o_stride.row, global_lse);
            }

            // S = Q K^T, in log2 units; P = 2^(S - m); O += P V
            Accumulator<warp_rows, block_n> s;
            s.clear();
            gemm<dtype, head_dim>(s, q_operand, k_operand);
            scale(s, params.softmax_scale * log2_e);
            softmax.update(s, o);
            auto p = round_to_operand<dtype>(s);
            gemm<dtype, block_n>(o, p, v_operand);

            softmax.finish(o);
            softmax.store_lse(global_lse);
            store_to_shared<QTile>(shared_q, warp_row, o);
            __syncwarp();
            store_rows<QTile, warp_rows>(global_o, params.o_stride.row, shared_q, warp_row);
        }
    }
}
