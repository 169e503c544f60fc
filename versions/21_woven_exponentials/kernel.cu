// Rung 20 with the exponentials woven in too: those of one chunk of P between the mmas that the chunk before it enters.
#include "block.cuh"
#include "config.cuh"
#include "lazy_softmax.cuh"
#include "load.cuh"
#include "stage.cuh"
#include "store.cuh"
#include "woven.cuh"

#include <type_traits>

using namespace config;

constexpr int num_threads = num_warps * 32;
constexpr int warp_rows = block_m / num_warps;

using QTile = SwizzledPanels<block_m, head_dim>;
using KVTile = SwizzledPanels<block_n, head_dim>;

constexpr int stage_size = 2 * KVTile::size;  // K and V
constexpr int stage_bytes = stage_size * sizeof(dtype);
constexpr int blocks_a_piece = block_n / 16 * (head_dim / 16) / copy_pieces;  // blocks of K as mmas take them

FLASHLADDER_LAUNCH(num_threads, QTile::size * sizeof(dtype) + 2 * stage_bytes, block_m, block_n);

extern "C" __global__ void __launch_bounds__(num_threads)
    attention_forward(const __grid_constant__ AttentionParams params) {
    extern __shared__ __align__(128) char shared[];
    dtype *shared_q = reinterpret_cast<dtype *>(shared);
    dtype *shared_k = shared_q + QTile::size;
    dtype *shared_v = shared_k + KVTile::size;

    const QueryBlock<dtype, block_m> block{params};
    const int warp_row = warp_index() * warp_rows;

    copy_tile<QTile, num_warps>(shared_q, block.q(), row_stride);
    cp_async_commit();
    StageCopier<KVTile, num_warps, dtype> copier;
    copier.start(shared_k + stage_size, row_stride);
    const int last = params.seqlen_k / block_n - 1;
    cp_async_wait<0>();
    __syncthreads();  // Q is there for every warp

    QOperand<warp_rows, head_dim, 2, HoistedReader<QTile, dtype>, 2> q_operand;
    Ring<block_n, head_dim, blocks_ahead, false, HoistedReader<KVTile, dtype, ByRow>> k_operand;
    Ring<head_dim, block_n, blocks_ahead, true, HoistedReader<KVTile, dtype>> v_operand;
    q_operand.start(shared_q, warp_row);
    k_operand.reader.start(shared_k);
    v_operand.reader.start(shared_v);

    Accumulator<warp_rows, head_dim> o;
    AnchoredSoftmax<dtype, warp_rows> softmax{params.softmax_scale * log2_e};

    int to_other_stage = stage_bytes;

    // From this block of K on, the last k-step has finished the first chunk of S.
    constexpr int early = k_operand.count - k_operand.per_step + 1;

    // Block j; with its maxima, or anchored to those before.
    auto attend = [&](int j, auto is_anchored) {
        constexpr bool anchored = decltype(is_anchored)::value;
        cp_async_wait<0>();
        __syncthreads();  // K and V are there for every warp, and every warp has read the other stage

        // S = Q K^T, while block j - 1 is copied. O += P V, each chunk of P made while the one before is multiplied; the
        // first while Q K^T ends: P = 2^(unit * S - m).
        Accumulator<warp_rows, block_n> s;
        HeldA<warp_rows, block_n> p;
        s.clear();
        q_operand.fetch(0);
        k_operand.fetch();
        woven_gemm<dtype>(s, q_operand, k_operand, [&](int t) {
            if (j > 0 && t % blocks_a_piece == 0) copier.copy<copy_pieces>(t / blocks_a_piece);
            if (anchored && t >= early) softmax.add_part(s, p, 0, t - early, k_operand.count - early);
        });
        cp_async_commit();
        if (!anchored) {
            softmax.update(s, o);
            p = round_to_operand<dtype>(s);
        }
        v_operand.fetch();
        woven_gemm<dtype>(o, p, v_operand, [&](int t) {
            const int chunk = t / v_operand.per_step + 1;
            if (anchored && chunk < block_n / 16)
                softmax.add_part(s, p, chunk, t % v_operand.per_step, v_operand.per_step);
        });
        if (anchored) softmax.settle(o);

        for (uint32_t *stage : {&k_operand.reader.base, &v_operand.reader.base}) *stage += to_other_stage;
        copier.to -= to_other_stage;
        to_other_stage = -to_other_stage;
    };
    // All blocks, from the last; those before block `anchored` have no maxima. True when that lost something.
    auto attend_all = [&](int anchored) {
        copier.rewind(block.k(), block.v(), last);
        copier.copy<1>(0, -to_other_stage, -to_other_stage);
        cp_async_commit();
        o.clear();
        softmax.clear();
        int j = last;
        for (; j >= anchored; --j) attend(j, std::false_type{});
        for (; j >= 0; --j) attend(j, std::true_type{});
        return softmax.lost();
    };
    if (__syncthreads_or(attend_all(last))) attend_all(0);

    softmax.finish_by_reciprocal(o);
    if (params.lse != nullptr) softmax.store_lse(block.lse() + warp_row);

    // A warp's rows of Q are read by that warp alone, so it may put its rows of O in their place.
    store_to_shared_hoisted<QTile>(shared_q, warp_row, o);
    __syncwarp();
    store_rows<QTile, warp_rows, StoreNoAllocate>(block.o(), row_stride, shared_q, warp_row);
}
