// Rung 23 with the loop of rung 22 for the blocks that every row sees whole. The others come first, in parts of a few
// keys: a warp leaves out the parts that it sees nothing of, and what a mask needs finds room in the registers.
#include "config.cuh"
#include "gemm.cuh"
#include "mask.cuh"
#include "masked_softmax.cuh"
#include "panels.cuh"
#include "schedule.cuh"
#include "store.cuh"
#include "woven.cuh"

using namespace config;

constexpr int num_threads = num_warps * 32;
constexpr int warp_rows = block_m / num_warps;

using QTile = SwizzledPanels<block_m, head_dim>;
using KVTile = SwizzledPanels<block_n, head_dim>;

constexpr int k_stages = 2, v_stages = 3;
constexpr int tile_bytes = KVTile::size * sizeof(dtype);
constexpr int blocks_a_piece = block_n / 16 * (head_dim / 16) / copy_pieces;  // blocks of K as mmas take them
constexpr int part_bytes = KVTile::step(edge_n, 0) * sizeof(dtype);

FLASHLADDER_LAUNCH(num_threads, QTile::size * sizeof(dtype) + (k_stages + v_stages) * tile_bytes, block_m, block_n);

extern "C" __global__ void __launch_bounds__(num_threads, ctas_per_sm)
    attention_forward(const __grid_constant__ AttentionParams params) {
    extern __shared__ __align__(128) char shared[];
    dtype *shared_q = reinterpret_cast<dtype *>(shared);
    dtype *shared_k = shared_q + QTile::size;
    dtype *shared_v = shared_k + k_stages * KVTile::size;

    // Worked out where it is needed, so that the main loop keeps nothing of it.
    using Work = Assignment<dtype, block_m, head_dim, causal>;
    const Mask<causal> mask{params};
    const int warp_row = uniform_warp_index() * warp_rows;

    PanelCopier<QTile, num_warps, dtype> q_copier;
    {
        const Work work{params, cta_index()};
        q_copier.start(shared_q, work.q(), params.q_stride.row);
        q_copier.copy_rows(0, work.rows());
    }
    PanelStageCopier<KVTile, num_warps, dtype> copier;
    copier.start(shared_k + KVTile::size, k_stages * tile_bytes, params.k_stride.row, params.v_stride.row);

    QOperand<warp_rows, head_dim, 2, HoistedReader<QTile, dtype>, 2> q_operand;
    Ring<block_n, head_dim, blocks_ahead, false, HoistedReader<KVTile, dtype, ByRow>> k_operand;
    Ring<head_dim, block_n, blocks_ahead, true, HoistedReader<KVTile, dtype>> v_operand;
    q_operand.start(shared_q, warp_row);
    k_operand.reader.start(shared_k);
    v_operand.reader.start(shared_v);

    Accumulator<warp_rows, head_dim> o;
    MaskedSoftmax<dtype, warp_rows> softmax{params.softmax_scale * log2_e};

    int k_step = tile_bytes, v_stage = 0;  // to K's other tile; where V is
    auto v_step = [&](int stage) { return stage + 1 < v_stages ? tile_bytes : (1 - v_stages) * tile_bytes; };
    auto next_stage = [&] {
        v_operand.reader.base += v_step(v_stage);
        v_stage = v_stage + 1 < v_stages ? v_stage + 1 : 0;
        copier.to -= k_step;
        copier.to_v += k_step + v_step(v_stage);
        k_step = -k_step;
    };

    // Block j, which a mask or an end may cut, part after part from its last keys; for the warp's rows from first_row on.
    auto attend_edge = [&](int j, int first_row) {
        cp_async_wait<0>();
        __syncthreads();  // block j is there for every warp, and none needs K or V of j + 1 any more
        if (j > 0) copier.template copy<1>(0);
        cp_async_commit();
        const int seen = min(mask.keys(first_row + warp_rows - 1) - j * block_n, block_n);
#pragma unroll 1
        for (int part = (seen + edge_n - 1) / edge_n - 1; part >= 0; --part) {
            KOperand<edge_n, head_dim, 2, HoistedReader<KVTile, dtype, ByRow>> k{k_operand.reader.base + part * part_bytes};
            VOperand<head_dim, edge_n, 2, HoistedReader<KVTile, dtype>> v{v_operand.reader.base + part * part_bytes};
            Accumulator<warp_rows, edge_n> s;
            s.clear();
            gemm<dtype, head_dim, false, Serpentine>(s, q_operand, k);
            mask.hide(s, first_row, j * block_n + part * edge_n);
            softmax.update(s, o);
            auto p = round_to_operand<dtype>(s);
            gemm<dtype, edge_n, false, Serpentine>(o, p, v);
        }
        k_operand.reader.base += k_step;
        next_stage();
    };

    // From this block of K on, the last k-step has finished the first chunk of S.
    constexpr int early = k_operand.count - (k_operand.per_step > 1 ? k_operand.per_step - 1 : 1);

    // Block j, of which every row sees all and for which it has an anchor.
    auto attend = [&](int j) {
        // S = Q K^T, while block j - 1 is copied. O += P V, each chunk of P made while the one before is multiplied; the
        // first while Q K^T ends: P = 2^(unit * S - m).
        Accumulator<warp_rows, block_n> s;
        HeldA<warp_rows, block_n> p;
        s.clear();
        woven_gemm<dtype>(s, q_operand, k_operand, [&](int t) {
            if (j > 0 && t % blocks_a_piece == 0) copier.template copy<copy_pieces>(t / blocks_a_piece);
            if (t >= early) softmax.add_part(s, p, 0, t - early, k_operand.count - early);
            if (t == k_operand.count - 2) v_operand.fetch();
        });
        cp_async_commit();
        k_operand.reader.base += k_step;
        woven_gemm<dtype>(o, p, v_operand, [&](int t) {
            const int chunk = t / v_operand.per_step + 1;
            if (chunk < block_n / 16) softmax.add_part(s, p, chunk, t % v_operand.per_step, v_operand.per_step);
            if (t == v_operand.count / 2) {
                cp_async_wait<0>();
                __syncthreads();  // block j - 1 is there for every warp, and none needs K of j or V of j + 1 any more
            }
            if (t == v_operand.count - 2 && j > 0) {
                q_operand.fetch(0);
                k_operand.fetch();
            }
        });
        softmax.settle(o);
        next_stage();
    };

    // All blocks, from the last; true when something was lost, which without plain blocks is nothing.
    auto attend_all = [&](bool any_plain) {
        const Work work{params, cta_index()};
        const int blocks = mask.template blocks<block_n>(work.first_row() + work.rows());
        const int plain_blocks = any_plain ? mask.template plain_blocks<block_n>(work.first_row()) : 0;
        const int last = max(blocks - 1, 0);
        copier.copy_last(work.k(), work.v(), last, params.seqlen_k - last * block_n, -k_step, -v_step(v_stage));
        cp_async_commit();
        o.clear();
        softmax.clear();
        int j = blocks - 1;
        for (; j >= plain_blocks; --j) attend_edge(j, work.first_row() + warp_row);
        cp_async_wait<0>();
        __syncthreads();  // the first plain block is there for every warp
        if (j >= 0) {
            q_operand.fetch(0);
            k_operand.fetch();
            for (; j >= 0; --j) attend(j);
        }
        return any_plain && softmax.lost();
    };
    for (bool any_plain = true; any_of_cta(attend_all(any_plain)); any_plain = false) {}

    softmax.finish(o);
    const Work work{params, cta_index()};
    if (params.lse != nullptr) softmax.store_lse(work.lse() + warp_row, work.rows() - warp_row);

    // A warp's rows of Q are read by that warp alone, so it may put its rows of O in their place.
    store_to_shared_hoisted<QTile>(shared_q, warp_row, o);
    __syncwarp();
    store_rows_before<QTile, warp_rows, StoreNoAllocate>(work.rows(), work.o(), params.o_stride.row, shared_q, warp_row);
}
