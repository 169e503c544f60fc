// Rung 18 with two stages of K and V: a block travels while the one before is computed, and one barrier a block is left.
#include "18_anchored_softmax/anchored_softmax.cuh"
#include "config.cuh"
#include "epilogue/store.cuh"
#include "pipeline/copy.cuh"
#include "schedule/query_block.cuh"
#include "tile/gemm.cuh"

#include <type_traits>

using namespace config;

constexpr int num_threads = num_warps * 32;
constexpr int warp_rows = block_m / num_warps;
constexpr int buffers = double_buffer ? 2 : 1;

using QTile = SwizzledPanels<block_m, head_dim>;
using KVTile = SwizzledPanels<block_n, head_dim>;

constexpr int stage_size = 2 * KVTile::size;  // K and V
constexpr int stage_bytes = stage_size * sizeof(dtype);

constexpr int loss_at = QTile::size * sizeof(dtype) + 2 * stage_bytes;

FLASHLADDER_LAUNCH(num_threads, loss_at + sizeof(Loss), block_m, block_n);

extern "C" __global__ void __launch_bounds__(num_threads)
    attention_forward(const __grid_constant__ AttentionParams params) {
    extern __shared__ __align__(128) char shared[];
    dtype *shared_q = reinterpret_cast<dtype *>(shared);
    dtype *shared_k = shared_q + QTile::size;
    dtype *shared_v = shared_k + KVTile::size;
    Loss &loss = *reinterpret_cast<Loss *>(shared + loss_at);
    loss.clear();

    const QueryBlock<dtype, block_m> block{params};
    const int warp_row = warp_index() * warp_rows;

    copy_tile<QTile, num_warps>(shared_q, block.q(), row_stride);
    cp_async_commit();
    TileCopier<KVTile, num_warps, dtype> k_copier, v_copier;
    k_copier.start(shared_k, block.k(), row_stride);
    v_copier.start(shared_v, block.v(), row_stride);
    const int last = params.seqlen_k / block_n - 1;
    cp_async_wait<0>();
    __syncthreads();  // Q is there for every warp

    QOperand<warp_rows, head_dim, q_fragments, HoistedReader<QTile, dtype>, buffers> q_operand;
    KOperand<block_n, head_dim, k_fragments, HoistedReader<KVTile, dtype, ByRow>, buffers> k_operand;
    VOperand<head_dim, block_n, v_fragments, HoistedReader<KVTile, dtype>, buffers> v_operand;
    q_operand.start(shared_q, warp_row);
    k_operand.reader.start(shared_k);
    v_operand.reader.start(shared_v);

    Accumulator<warp_rows, head_dim> o;
    AnchoredSoftmax<dtype, warp_rows> softmax{params.softmax_scale * log2_e};

    int to_other_stage = stage_bytes;

    // Block j; with its maxima, or anchored to those before. True when the CTA is to stop.
    auto attend = [&](int j, auto is_anchored) {
        cp_async_wait<0>();
        __syncthreads();  // K and V are there for every warp, and every warp has read the other stage
        bool stop = loss.known(j + 1);
        if (j > 0) {
            k_copier.copy(j - 1, to_other_stage);
            v_copier.copy(j - 1, to_other_stage);
            cp_async_commit();
        }

        // S = Q K^T
        Accumulator<warp_rows, block_n> s;
        s.clear();
        gemm<dtype, head_dim, double_buffer, Serpentine>(s, q_operand, k_operand);

        // P = 2^(unit * S - m)
        if constexpr (decltype(is_anchored)::value)
            softmax.add(s);
        else
            softmax.update(s, o, j);

        // O += P V
        auto p = round_to_operand<dtype>(s);
        gemm<dtype, block_n, double_buffer, Serpentine>(o, p, v_operand, [&](int step) { softmax.weigh(p, step); });
        if constexpr (decltype(is_anchored)::value) stop = softmax.settle(o, j, stop, loss);

        for (uint32_t *stage : {&k_copier.to, &v_copier.to, &k_operand.reader.base, &v_operand.reader.base})
            *stage += to_other_stage;
        to_other_stage = -to_other_stage;
        return stop;
    };
    // The blocks of a pass. The first one has its maxima.
    auto attend_all = [&](const Pass &pass) {
        k_copier.copy(pass.from);
        v_copier.copy(pass.from);
        cp_async_commit();
        return attend_down<dtype>(pass, pass.from - 1, last, softmax, loss, attend);
    };
    attend_passes(last, softmax, o, attend_all);

    softmax.finish(o);
    if (params.lse != nullptr) softmax.store_lse(block.lse() + warp_row);

    // A warp's rows of Q are read by that warp alone, so it may put its rows of O in their place.
    store_to_shared_hoisted<QTile>(shared_q, warp_row, o);
    __syncwarp();
    store_rows<QTile, warp_rows, StoreNoAllocate>(block.o(), row_stride, shared_q, warp_row);
}
