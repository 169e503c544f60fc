// Rung 19 with the copies woven in between the mmas of Q K^T, from pointers that run backwards through K and V.
#include "18_anchored_softmax/anchored_softmax.cuh"
#include "20_woven_copies/stage_copier.cuh"
#include "20_woven_copies/woven_gemm.cuh"
#include "config.cuh"
#include "epilogue/store.cuh"
#include "pipeline/copy.cuh"
#include "schedule/query_block.cuh"

#include <type_traits>

using namespace config;

constexpr int num_threads = num_warps * 32;
constexpr int warp_rows = block_m / num_warps;

using QTile = SwizzledPanels<block_m, head_dim>;
using KVTile = SwizzledPanels<block_n, head_dim>;

constexpr int k_stages = 2, v_stages = 2;
constexpr int tile_bytes = KVTile::size * sizeof(dtype);
constexpr int loss_at = QTile::size * sizeof(dtype) + (k_stages + v_stages) * tile_bytes;

FLASHLADDER_LAUNCH(num_threads, loss_at + sizeof(Loss), block_m, block_n);

extern "C" __global__ void __launch_bounds__(num_threads)
    attention_forward(const __grid_constant__ AttentionParams params) {
    extern __shared__ __align__(128) char shared[];
    dtype *shared_q = reinterpret_cast<dtype *>(shared);
    dtype *shared_k = shared_q + QTile::size;
    dtype *shared_v = shared_k + k_stages * KVTile::size;
    Loss &loss = *reinterpret_cast<Loss *>(shared + loss_at);
    loss.clear();

    const QueryBlock<dtype, block_m> block{params};
    const int warp_row = warp_index() * warp_rows;

    copy_tile<QTile, num_warps>(shared_q, block.q(), row_stride);
    cp_async_commit();
    StageCopier<KVTile, num_warps, dtype> copier;
    copier.start(shared_k + KVTile::size, shared_v + KVTile::size, row_stride);
    const int last = params.seqlen_k / block_n - 1;
    cp_async_wait<0>();
    __syncthreads();  // Q is there for every warp

    QOperand<warp_rows, head_dim, 2, HoistedReader<QTile, dtype>, 2> q_operand;
    FragmentRing<block_n, head_dim, blocks_ahead, false, HoistedReader<KVTile, dtype, ByRow>> k_operand;
    FragmentRing<head_dim, block_n, blocks_ahead, true, HoistedReader<KVTile, dtype>> v_operand;
    q_operand.start(shared_q, warp_row);
    k_operand.reader.start(shared_k);
    v_operand.reader.start(shared_v);
    TileRing<k_stages, tile_bytes> k_tiles;
    TileRing<v_stages, tile_bytes> v_tiles;

    Accumulator<warp_rows, head_dim> o;
    AnchoredSoftmax<dtype, warp_rows> softmax{params.softmax_scale * log2_e};

    // Block j; with its maxima, or anchored to those before. True when the CTA is to stop.
    auto attend = [&](int j, auto is_anchored) {
        cp_async_wait<0>();
        __syncthreads();  // K and V are there for every warp, and every warp has read the other tiles
        bool stop = loss.known(j + 1);

        // S = Q K^T, while block j - 1 is copied
        Accumulator<warp_rows, block_n> s;
        s.clear();
        q_operand.fetch(0);
        k_operand.fetch();
        woven_gemm<dtype>(s, q_operand, k_operand, [&](int t) {
            if (j > 0) copier.copy_part<copy_pieces>(t, k_operand.count);
        });
        cp_async_commit();

        // P = 2^(unit * S - m)
        if constexpr (decltype(is_anchored)::value)
            softmax.add(s);
        else
            softmax.update(s, o, j);

        // O += P V
        auto p = round_to_operand<dtype>(s);
        v_operand.fetch();
        woven_gemm<dtype>(o, p, v_operand, [&](int t) {
            if (t % v_operand.per_step == 0) softmax.weigh(p, t / v_operand.per_step);
        });
        if constexpr (decltype(is_anchored)::value) stop = softmax.settle(o, j, stop, loss);

        k_tiles.turn(k_operand.reader.base, copier.to_k);
        v_tiles.turn(v_operand.reader.base, copier.to_v);
        return stop;
    };
    // The blocks of a pass. The first one has its maxima.
    auto attend_all = [&](const Pass &pass) {
        copier.copy_block(block.k(), block.v(), pass.from, -k_tiles.to_next(), -v_tiles.to_next());
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
