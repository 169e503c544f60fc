// Rung 21 with the barrier amid P V, where every warp has other work left: with a third tile of V, what a barrier sets
// free and what it brings are both for later, and the first fragments of the next product are fetched before this one ends.
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

constexpr int k_stages = 2, v_stages = 3;
constexpr int tile_bytes = KVTile::size * sizeof(dtype);
constexpr int blocks_a_piece = block_n / 16 * (head_dim / 16) / copy_pieces;  // blocks of K as mmas take them

FLASHLADDER_LAUNCH(num_threads, QTile::size * sizeof(dtype) + (k_stages + v_stages) * tile_bytes, block_m, block_n);

extern "C" __global__ void __launch_bounds__(num_threads)
    attention_forward(const __grid_constant__ AttentionParams params) {
    extern __shared__ __align__(128) char shared[];
    dtype *shared_q = reinterpret_cast<dtype *>(shared);
    dtype *shared_k = shared_q + QTile::size;
    dtype *shared_v = shared_k + k_stages * KVTile::size;

    const QueryBlock<dtype, block_m> block{params};
    const int warp_row = warp_index() * warp_rows;

    copy_tile<QTile, num_warps>(shared_q, block.q(), row_stride);
    cp_async_commit();
    StageCopier<KVTile, num_warps, dtype> copier;
    copier.start(shared_k + KVTile::size, row_stride);
    copier.to_v = k_stages * tile_bytes;  // K's second tile to V's second
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

    int k_step = tile_bytes, v_stage = 0;  // to K's other tile; where V is
    auto v_step = [&](int stage) { return stage + 1 < v_stages ? tile_bytes : (1 - v_stages) * tile_bytes; };

    // From this block of K on, the last k-step has finished the first chunk of S.
    constexpr int early = k_operand.count - k_operand.per_step + 1;

    // Block j; with its maxima, or anchored to those before.
    auto attend = [&](int j, auto is_anchored) {
        constexpr bool anchored = decltype(is_anchored)::value;

        // S = Q K^T, while block j - 1 is copied. O += P V, each chunk of P made while the one before is multiplied; the
        // first while Q K^T ends: P = 2^(unit * S - m).
        Accumulator<warp_rows, block_n> s;
        HeldA<warp_rows, block_n> p;
        s.clear();
        woven_gemm<dtype>(s, q_operand, k_operand, [&](int t) {
            if (j > 0 && t % blocks_a_piece == 0) copier.copy<copy_pieces>(t / blocks_a_piece);
            if (anchored && t >= early) softmax.add_part(s, p, 0, t - early, k_operand.count - early);
            if (t == k_operand.count - 2) v_operand.fetch();
        });
        cp_async_commit();
        k_operand.reader.base += k_step;
        if (!anchored) {
            softmax.update(s, o);
            p = round_to_operand<dtype>(s);
        }
        woven_gemm<dtype>(o, p, v_operand, [&](int t) {
            const int chunk = t / v_operand.per_step + 1;
            if (anchored && chunk < block_n / 16)
                softmax.add_part(s, p, chunk, t % v_operand.per_step, v_operand.per_step);
            if (t == v_operand.count / 2) {
                cp_async_wait<0>();
                __syncthreads();  // block j - 1 is there for every warp, and none needs K of j or V of j + 1 any more
            }
            if (t == v_operand.count - 2 && j > 0) {
                q_operand.fetch(0);
                k_operand.fetch();
            }
        });
        if (anchored) softmax.settle(o);

        v_operand.reader.base += v_step(v_stage);
        v_stage = v_stage + 1 < v_stages ? v_stage + 1 : 0;
        copier.to -= k_step;
        copier.to_v += k_step + v_step(v_stage);
        k_step = -k_step;
    };
    // All blocks, from the last; those before block `anchored` have no maxima. True when that lost something.
    auto attend_all = [&](int anchored) {
        copier.rewind(block.k(), block.v(), last);
        copier.copy<1>(0, -k_step, -v_step(v_stage));
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();  // the last block is there for every warp
        q_operand.fetch(0);
        k_operand.fetch();
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
