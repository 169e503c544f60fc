// Rung 24, and between the two products what an expression says of each score: what it becomes, and whether its row sees
// the key. The expression comes with the configuration, as text that is printed from a tree (common/expression).
#include "20_woven_copies/woven_gemm.cuh"
#include "21_woven_exponentials/woven_softmax.cuh"
#include "23_general/assignment.cuh"
#include "23_general/panels.cuh"
#include "24_woven_general/alibi.cuh"
#include "24_woven_general/narrower.cuh"
#include "24_woven_general/packed_assignment.cuh"
#include "24_woven_general/panel_stage.cuh"
#include "24_woven_general/scores_in_log2.cuh"
#include "24_woven_general/sinking_softmax.cuh"
#include "24_woven_general/woven_dropout.cuh"
#include "51_any_mask/modified_scores.cuh"
#include "config.cuh"
#include "epilogue/store.cuh"
#include "launch.cuh"
#include "softmax/dropout.cuh"
#include "softmax/mask.cuh"
#include "tile/gemm.cuh"

#include <type_traits>

using namespace config;

constexpr int num_threads = num_warps * 32;
constexpr int warp_rows = block_m / num_warps;

// Columns of V and O. Of 512 a thread has no registers for O: then two CTAs share them, and each computes all scores.
constexpr int shares = head_dim > 256 ? 2 : 1, share_cols = head_dim / shares;

using QTile = SwizzledPanels<block_m, head_dim>;
using OTile = SwizzledPanels<block_m, share_cols>;  // in the place of Q
using KTile = SwizzledPanels<block_n, head_dim>;
using VTile = SwizzledPanels<block_n, share_cols>;

constexpr int k_stages = 2, v_stages = 3;
constexpr int k_bytes = KTile::size * sizeof(dtype), v_bytes = VTile::size * sizeof(dtype);
constexpr int part_bytes = KTile::step(edge_n, 0) * sizeof(dtype);

constexpr int loss_at = QTile::size * sizeof(dtype) + k_stages * k_bytes + v_stages * v_bytes;

using Tensors = std::conditional_t<packed, PackedParams, AttentionParams>;
using BoundedTensors = std::conditional_t<window || softcap, Bounded<Tensors>, Tensors>;
using BiasedTensors = std::conditional_t<alibi, Biased<BoundedTensors>, BoundedTensors>;
using SinkingTensors = std::conditional_t<sinks, Sinking<BiasedTensors>, BiasedTensors>;
using DroppingTensors = std::conditional_t<dropout, Dropping<SinkingTensors>, SinkingTensors>;
using NarrowerTensors = std::conditional_t<narrower, Narrower<DroppingTensors>, DroppingTensors>;
using Params = Reading<NarrowerTensors>;
constexpr Launch whole{num_threads, loss_at + sizeof(Loss), block_m, block_n};
FLASHLADDER_KERNEL(attention_forward, Params, shares > 1 ? whole.over("cdiv(seqlen_q, block_m)", "num_heads * 2", "batch") : whole);

extern "C" __global__ void __launch_bounds__(num_threads, ctas_per_sm)
    attention_forward(const __grid_constant__ Params params) {
    extern __shared__ __align__(128) char shared[];
    dtype *shared_q = reinterpret_cast<dtype *>(shared);
    dtype *shared_k = shared_q + QTile::size;
    dtype *shared_v = shared_k + k_stages * KTile::size;

    Loss &loss = *reinterpret_cast<Loss *>(shared + loss_at);
    loss.clear();

    // Worked out where it is needed, so that the main loop keeps nothing of it. Within a window all blocks of rows see
    // about as many keys, so none need start first.
    using Work = std::conditional_t<packed, PackedAssignment<dtype, block_m, head_dim>,
                                    Assignment<dtype, block_m, head_dim, causal && !window>>;
    Mask<causal, window> mask{params};
    auto assigned = [&] {
        Work work{params, cta_index()};
        work.head /= shares;
        if constexpr (packed) mask.take(work.seqlen_q(), work.seqlen_k());
        return work;
    };
    const auto first_col = [&] {
        if constexpr (shares > 1)
            return Work{params, cta_index()}.head % shares * share_cols;
        else
            return Zero{};
    };
    const int warp_row = uniform_warp_index() * warp_rows;

    const auto columns = columns_of<narrower>(params), columns_v = columns_of_v<narrower>(params, first_col());
    using Columns = std::remove_const_t<decltype(columns)>;
    PanelCopier<QTile, num_warps, dtype, Columns> q_copier{columns};
    {
        const Work work = assigned();
        if (packed && work.rows() <= 0) return;  // behind the end of its sequence
        q_copier.start(shared_q, work.q(), params.q_stride.row);
        q_copier.copy_rows(0, work.rows());
    }
    PanelStageCopier<KTile, VTile, num_warps, dtype, Columns> copier{columns, columns_v};
    copier.start(shared_k + KTile::size, shared_v + VTile::size, params.k_stride.row, params.v_stride.row);

    QOperand<warp_rows, head_dim, 2, HoistedReader<QTile, dtype>, 2> q_operand;
    FragmentRing<block_n, head_dim, blocks_ahead, false, HoistedReader<KTile, dtype, ByRow>> k_operand;
    FragmentRing<share_cols, block_n, blocks_ahead, true, HoistedReader<VTile, dtype>> v_operand;
    q_operand.start(shared_q, warp_row);
    k_operand.reader.start(shared_k);
    v_operand.reader.start(shared_v);
    TileRing<k_stages, k_bytes> k_tiles;
    TileRing<v_stages, v_bytes> v_tiles;

    Accumulator<warp_rows, share_cols> o;
    const ScoresInLog2<softcap> score{params};
    const Bias<alibi> bias{params, assigned, mask, warp_row, 1.0f};
    const ModifiedScores<Mods, has_mask, has_score, Params, Mask<causal, window>> modified{params, assigned, mask};
    SinkingSoftmax<dtype, warp_rows> softmax{1.0f};

    // The first block and the last of which some row sees a key.
    const auto lowest = mask.template first_block<block_n>(window ? assigned().first_row() : 0);
    const int last = [&] {
        const Work work = assigned();
        return mask.template blocks<block_n>(work.first_row() + work.rows()) - 1;
    }();

    const Dropout<dropout> dropping{params, assigned};
    constexpr bool has_mods = has_mask || has_score;
    const int first_of_warp = dropout || has_mods ? assigned().first_row() + warp_row : 0;  // kept for the main loop

    // Block j, which a mask or an end may cut, part after part from its last keys; for the warp's rows from first_row on.
    auto attend_edge = [&](int j, int first_row) {
        cp_async_wait<0>();
        __syncthreads();  // block j is there for every warp, and none needs K or V of j + 1 any more
        if (j > lowest) copier.template copy<1>(0);
        cp_async_commit();
        const int seen = min(mask.keys(first_row + warp_rows - 1) - j * block_n, block_n);
        const int unseen = window ? max(mask.first(first_row) - j * block_n, 0) : 0;
#pragma unroll 1
        for (int part = (seen + edge_n - 1) / edge_n - 1; part >= unseen / edge_n; --part) {
            KOperand<edge_n, head_dim, 2, HoistedReader<KTile, dtype, ByRow>> k{k_operand.reader.base + part * part_bytes};
            VOperand<share_cols, edge_n, 2, HoistedReader<VTile, dtype>> v{v_operand.reader.base + part * part_bytes};
            Accumulator<warp_rows, edge_n> s;
            s.clear();
            gemm<dtype, head_dim, false, Serpentine>(s, q_operand, k);
            score.apply(s);
            bias.add(s, j * block_n + part * edge_n);
            modified.template apply<true>(s, first_row, j * block_n + part * edge_n);
            mask.hide(s, first_row, j * block_n + part * edge_n);
            softmax.update(s, o, j);
            auto p = round_to_operand<dtype>(s);
            if constexpr (dropout) {
                dropping.weigh_and_drop(softmax, p, first_row, j * block_n + part * edge_n);
                gemm<dtype, edge_n, false, Serpentine>(o, p, v);
            } else {
                gemm<dtype, edge_n, false, Serpentine>(o, p, v, [&](int step) { softmax.weigh(p, step); });
            }
        }
        k_tiles.turn(k_operand.reader.base, copier.to_k);
        v_tiles.turn(v_operand.reader.base, copier.to_v);
    };

    constexpr int chunks = block_n / 16, per_chunk = v_operand.per_step;  // chunks of 16 keys; blocks of V that one enters
    // So many blocks of K are left when the first chunk of S is finished.
    constexpr int early = k_operand.per_step > 1 ? k_operand.per_step - 1 : 1;

    // Block j, of which every row sees all; with its maxima, or anchored to those before. True when the CTA is to stop.
    auto attend = [&](int j, auto is_anchored) {
        constexpr bool anchored = decltype(is_anchored)::value;
        bool stop = false;
        Accumulator<warp_rows, block_n> s;
        HeldA<warp_rows, block_n> p;

        // S = Q K^T, with the copies of block j - 1 woven in, and the first chunk of P = 2^(unit * S - m)
        s.clear();
        woven_gemm<dtype>(s, q_operand, k_operand, [&](int t) {
            if (j > lowest) copier.template copy_part<copy_pieces>(t, k_operand.count);
            const int part = t - (k_operand.count - early);
            if (anchored && part >= 0) softmax.add_part(s, p, 0, part, early, score);
            if (t == k_operand.count - 2) v_operand.fetch();
        });
        cp_async_commit();
        k_tiles.turn(k_operand.reader.base, copier.to_k);
        if (!anchored) {
            score.apply(s);
            bias.add(s, j * block_n);
            modified.template apply<false>(s, first_of_warp, j * block_n);
            softmax.update(s, o, j);
            p = round_to_operand<dtype>(s);
        }

        // With dropout a chunk is weighed before it enters, as it then has zeros where weights are dropped.
        WovenDropout<dropout, warp_rows, block_n> mask_of{dropping, first_of_warp, j * block_n};
        auto drop = [&](int chunk) {
            softmax.weigh(p, chunk);
            mask_of.drop(p, chunk);
        };
        if (dropout) drop(0);

        // O += P V, chunk after chunk, with the next chunk of P woven in
        woven_gemm<dtype>(o, p, v_operand, [&](int t) {
            const int chunk = t / per_chunk, part = t % per_chunk;
            if (!dropout && part == 0) softmax.weigh(p, chunk);
            if (anchored && chunk + 1 < chunks) softmax.add_part(s, p, chunk + 1, part, per_chunk, score);
            if (dropout && chunk + 1 < chunks) {
                // Two chunks share a draw: beside the first this draw takes the mask of the second, beside the second it ends.
                const bool is_last = part == per_chunk - 1, is_first = chunk % 2 == 0;
                if (is_last && is_first) drop(chunk + 1);
                mask_of.draw_part(chunk, part, per_chunk);
                if (is_last && !is_first) drop(chunk + 1);
            }
            if (t == v_operand.count / 2) {
                cp_async_wait<0>();
                __syncthreads();  // block j - 1 is there for every warp, and none needs K of j or V of j + 1 any more
                if (anchored) stop = loss.known(j + 1);
            }
            if (t == v_operand.count - 2 && j > lowest) {
                q_operand.fetch(0);
                k_operand.fetch();
            }
        });
        v_tiles.turn(v_operand.reader.base, copier.to_v);
        if (anchored) stop = softmax.settle(o, j, stop, loss);
        return stop;
    };

    // The blocks of a pass, first those at the edge, but for those that a window's left end cuts.
    auto attend_all = [&](Pass pass) {
        const Work work = assigned();
        const int first = max(pass.from, 0);  // no row may see any key
        copier.copy_block(work.k(), work.v() + first_col(), first, work.seqlen_k() - first * block_n, -k_tiles.to_next(), -v_tiles.to_next());
        cp_async_commit();
        const auto lowest_plain = mask.template first_plain_block<block_n>(work.first_row() + block_m - 1);
        const int plain_blocks = max(mask.template plain_blocks<block_n>(work.first_row()), int(lowest_plain));
        for (; pass.from >= plain_blocks; --pass.from) attend_edge(pass.from, work.first_row() + warp_row);
        cp_async_wait<0>();
        __syncthreads();  // the first plain block is there for every warp
        if (pass.from < lowest_plain) {
            if (window) pass.from = -1;  // blocks may be left, but none of a pass
            return pass;
        }
        q_operand.fetch(0);
        k_operand.fetch();
        // With a bias, scores may grow by far from block to block: an anchor would not hold. Nor does it look at scores.
        using Anchored = std::conditional_t<alibi || has_mods, __half, dtype>;
        return attend_down<Anchored>(pass, pass.from, last, softmax, loss, attend, lowest_plain);
    };
    attend_passes(last, softmax, o, attend_all);
    if constexpr (window) {
        const int first_row = assigned().first_row();
        const int lowest_plain = mask.template first_plain_block<block_n>(first_row + block_m - 1);
        for (int j = lowest_plain - 1; j >= lowest; --j) attend_edge(j, first_row + warp_row);
    }

    softmax.finish(o);
    if constexpr (sinks) {
        Sink<sinks> sink;
        sink.take(params, assigned().head);
        softmax.join(sink, o);
    }
    if constexpr (dropout) scale(o, dropping.rescale);
    const Work work = assigned();
    if (lse && params.lse != nullptr && first_col() == 0) softmax.store_lse(work.lse() + warp_row, work.rows() - warp_row);

    // A warp's rows of Q are read by that warp alone, so it may put its rows of O in their place.
    store_to_shared_hoisted<OTile>(shared_q, warp_row, o);
    __syncwarp();
    store_rows_before<OTile, warp_rows, StoreNoAllocate>(work.rows(), work.o() + first_col(), params.o_stride.row, shared_q, warp_row,
                                                         columns_v);
}
