// Rung 11 beside a mask and a score that are expressions, which come with the configuration, as text that is printed from a
// tree (common/expression); and gradients of the tensors that a score reads.
#include "modified_weights.cuh"
#include "slope_sums.cuh"
#include "23_general/panels.cuh"
#include "bounded_key_mask.cuh"
#include "dq.cuh"
#include "dq_fragments.cuh"
#include "epilogue/store.cuh"
#include "key_mask.cuh"
#include "pair.cuh"
#include "row_numbers.cuh"
#include "sequence.cuh"
#include "softmax/dropout.cuh"
#include "softmax/online.cuh"
#include "tile/gemm.cuh"
#include "turns.cuh"
#include "whole_letters.cuh"

#include <type_traits>

using namespace config;

constexpr int num_pairs = block_n / warp_keys;
constexpr int num_warps = 2 * num_pairs;
constexpr int num_threads = num_warps * 32;
constexpr int warp_rows = 2048 / warp_keys < block_m ? 2048 / warp_keys : block_m;  // of S at a time: 64 registers
constexpr int dq_rows = block_m / dq_warps;  // of a warp's part of dQ
constexpr int dq_cols = head_dim / (num_warps / dq_warps);

using QTile = SwizzledPanels<block_m, head_dim>;  // of Q and dO
using KTile = SwizzledPanels<block_n, head_dim>;  // of K and V
using STile = Swizzled<block_n, block_m>;   // of dS^T

// A tile of Q, and the one behind it: of the same head, or the first of the next.
struct QueryTile {
    int head, number;

    __device__ void advance(int first, int end) {
        if (++number < end) return;
        number = first;
        ++head;
    }
};

// What travels together.
struct Stage {
    dtype q[QTile::size], dout[QTile::size];
};
struct Shared {
    dtype k[KTile::size], v[KTile::size];
    dtype ds[2][STile::size];
    Stage stage[2];
    RowNumbers<block_m> numbers[2];
};

// A pair's letters take the place of its dS. Not so where dS comes in parts, as each would lie on letters of the next.
constexpr bool has_mailboxes = warp_rows < block_m;
constexpr int shared_bytes = sizeof(Shared) + has_mailboxes * STile::size * sizeof(dtype);

// Rows of Q are padded to whole tiles, in which a sequence begins.
FLASHLADDER_WORKSPACE(lse_log2, float, "num_heads * (total_q // block_m + batch) * block_m");
FLASHLADDER_WORKSPACE(delta, float, "num_heads * (total_q // block_m + batch) * block_m");
FLASHLADDER_WORKSPACE(dq_sum, float, "num_heads * (total_q // block_m + batch) * block_m * head_dim * wants_dq");
FLASHLADDER_WORKSPACE(added, unsigned, "num_heads * (total_q // block_m + batch)");
struct CountedWorkspaces : PaddedWorkspaces {
    unsigned *added;  // to each tile of dQ: tiles of keys
};

using Tensors = std::conditional_t<packed, PackedBackwardParams, BackwardParams>;
using BoundedTensors = std::conditional_t<window || softcap, Bounded<Tensors>, Tensors>;
using BiasedTensors = std::conditional_t<alibi, Biased<BoundedTensors>, BoundedTensors>;
using DroppingTensors = std::conditional_t<dropout, Dropping<BiasedTensors>, BiasedTensors>;
using PulledTensors = std::conditional_t<dlse, WithLseGradient<DroppingTensors>, DroppingTensors>;
using Params = Reading<std::conditional_t<dsinks, WithSinkGradient<PulledTensors>, PulledTensors>>;
using Work = BackwardSequence<Params, packed>;
using KeyBounds = BoundedKeyMask<causal, window>;
using Weights = ModifiedWeights<Mods, has_mask, has_score, softcap, alibi, Params, KeyBounds>;

FLASHLADDER_KERNEL(backward_prepare, Params, Launch{pass_threads, 0, block_m});
extern "C" __global__ void __launch_bounds__(pass_threads)
    backward_prepare(const __grid_constant__ Params p, const __grid_constant__ CountedWorkspaces workspaces) {
    if constexpr (has_gradients) clear_gradients<Mods>(p);
    const Work work{p, static_cast<int>(blockIdx.z)};
    if (packed && blockIdx.x * block_m >= work.seqlen_q) return;
    prepare_tile<wants_dq>(work, workspaces);
    if (deterministic && threadIdx.x == 0) workspaces.added[work.padded_row(blockIdx.y, blockIdx.x) / block_m] = 0;
}

// The gradients of keys that no row sees.
__device__ void clear_rows(dtype *global, long long row_stride, int rows) {
    for (int i = threadIdx.x; i < rows * (head_dim / chunk); i += num_threads)
        store_global_16(global + i / (head_dim / chunk) * row_stride + i % (head_dim / chunk) * chunk, {});
}

// dV or dK of a warp, in the place of the tile of K or V that nobody reads any more, and from there to global memory.
__device__ void store_sum(dtype *shared, int warp_key, dtype *global, long long row_stride, int keys,
                          const Accumulator<warp_keys, head_dim> &sum) {
    store_to_shared<KTile>(shared, warp_key, sum);
    __syncwarp();
    store_rows_before<KTile, warp_keys, StoreDefault>(keys, global, row_stride, shared, warp_key);
}

// The tiles of rows, from the first one on and up to the last one, that see a tile of keys.
__device__ int first_row_tile(const KeyBounds &mask, int first_key) { return mask.first_row(first_key) / block_m; }
__device__ int end_row_tile(const KeyBounds &mask, int last_key) {
    return (min(mask.end_row(last_key), mask.nobody) + block_m - 1) / block_m;
}

using RowCopier = PanelCopier<QTile, num_warps, dtype>;

// Starts copying a tile of rows, and what is known of them.
__device__ void copy_rows(Stage &stage, RowNumbers<block_m> &numbers, const Work &work, const CountedWorkspaces &workspaces,
                          const QueryTile &at, RowCopier &q_copier, RowCopier &dout_copier) {
    const int rows = work.seqlen_q - at.number * block_m;
    const long long padded = work.padded_row(at.head, at.number);
    q_copier.start(stage.q, work.like_q(work.p.q, work.p.q_stride, at.head), work.p.q_stride.row);
    dout_copier.start(stage.dout, work.like_q(work.p.dout, work.p.dout_stride, at.head), work.p.dout_stride.row);
    if (rows >= block_m) {
        q_copier.copy(at.number);
        dout_copier.copy(at.number);
    } else {
        q_copier.copy_rows(at.number, rows);
        dout_copier.copy_rows(at.number, rows);
    }
    numbers.copy(workspaces.lse + padded, workspaces.delta + padded);
}

FLASHLADDER_KERNEL(attention_backward, Params,
                   Launch{num_threads, shared_bytes, block_m, block_n}.over("cdiv(seqlen_k, block_n)", "num_heads_k * max(wants_dq, wants_dkv)", "batch"));
extern "C" __global__ void __launch_bounds__(num_threads, ctas_per_sm)
    attention_backward(const __grid_constant__ Params p, const __grid_constant__ CountedWorkspaces workspaces) {
    extern __shared__ __align__(128) char shared_memory[];
    Shared &shared = *reinterpret_cast<Shared *>(shared_memory);

    // Within a window all keys are seen by about as many rows, so none need start first.
    KeyTile<head_dim, causal && !window && !deterministic> tile{p};
    if (deterministic) tile.number = tile_from_the_end();
    const Work work{p, tile.batch};
    KeyBounds mask{p};
    if constexpr (packed) mask.take(work.seqlen_q, work.seqlen_k);
    const int head_k = tile.head, group = p.num_heads / p.num_heads_k;
    const int first_key = tile.number * block_n, end_key = min(block_n, work.seqlen_k - first_key);
    if (packed && end_key <= 0) return;  // behind the end of its sequence
    dtype *dk = work.like_k(p.dk, p.dk_stride, head_k) + first_key * p.dk_stride.row;
    dtype *dv = work.like_k(p.dv, p.dv_stride, head_k) + first_key * p.dv_stride.row;

    // The tiles of Q of all heads that share the keys, one head behind the other. The last one of a head may be cut.
    const int first_tile = first_row_tile(mask, first_key), end_tile = end_row_tile(mask, first_key + end_key - 1);
    const int tiles = (end_tile - first_tile) * group;
    if ((window || packed) && tiles <= 0) {
        if (!wants_dkv) return;
        clear_rows(dk, p.dk_stride.row, end_key);
        clear_rows(dv, p.dv_stride.row, end_key);
        return;
    }

    const int warp = uniform_warp_index(), pair = warp % num_pairs, warp_key = pair * warp_keys;
    const bool has_values = warp < num_pairs;
    const int dq_row = warp % dq_warps * dq_rows, dq_col = warp / dq_warps * dq_cols;

    PanelCopier<KTile, num_warps, dtype> k_copier, v_copier;
    k_copier.start(shared.k, work.like_k(p.k, p.k_stride, head_k), p.k_stride.row);
    v_copier.start(shared.v, work.like_k(p.v, p.v_stride, head_k), p.v_stride.row);
    k_copier.copy_rows(tile.number, end_key);
    v_copier.copy_rows(tile.number, end_key);

    QueryTile next{head_k * group, first_tile};
    RowCopier q_copier, dout_copier;
    auto copy = [&](int i) {
        copy_rows(shared.stage[i % 2], shared.numbers[i % 2], work, workspaces, next, q_copier, dout_copier);
        cp_async_commit();
        next.advance(first_tile, end_tile);
    };
    copy(0);

    // A warp of either role multiplies a tile that stays by the rows of one that passes, and what comes of it by the
    // columns of the other one.
    const dtype *stays = has_values ? shared.k : shared.v;
    QOperand<warp_keys, head_dim, 2, HoistedReader<KTile, dtype>> keys;
    KOperand<warp_rows, head_dim, 2, HoistedReader<QTile, dtype, ByRow>> rows;
    VOperand<head_dim, warp_rows, 2, HoistedReader<QTile, dtype>> columns;
    DSOperand<dq_rows, block_n, HoistedColumns<STile, dtype, ByRow>> ds_columns;
    using KColumns = std::conditional_t<dq_cols == 48, ColumnReader<KTile, dtype>, HoistedColumns<KTile, dtype>>;
    VOperand<dq_cols, block_n, 2, KColumns> k_columns;
    keys.start(stays, warp_key);
    k_columns.reader.start(shared.k, dq_col);

    const Softcap<softcap> score{p};
    Dropout<dropout> dropping{p, tile.batch, 0};
    Accumulator<warp_keys, head_dim> sum;  // dV or dK
    sum.clear();

    // dQ = dS K of tile i, once every key warp has stored its dS
    auto add_dq = [&](int i, const QueryTile &at) {
        if (!wants_dq) return;
        Accumulator<dq_rows, dq_cols> dq;
        dq.clear();
        ds_columns.reader.start(shared.ds[i % 2], dq_row);
        gemm<dtype, block_n>(dq, ds_columns, k_columns);
        const long long row = work.padded_row(at.head, at.number);
        if (deterministic) {
            if (lane_index() == 0)
                wait_until_added(workspaces.added + row / block_m, tiles_before(mask, tile.number, at.number));
            __syncwarp();  // it is this tile's turn
        }
        add_fragments(workspaces.dq_sum + row * head_dim, dq);
    };

    // All warps have added to this tile of dQ: it is the next CTA's turn.
    auto end_turn = [&](const QueryTile &of) {
        if (deterministic && threadIdx.x == 0)
            add_release(workspaces.added + work.padded_row(of.head, of.number) / block_m, 1);
    };

    QueryTile at{head_k * group, first_tile}, before = at, added = at;
    for (int i = 0; i < tiles; ++i) {
        cp_async_wait<0>();
        __syncthreads();  // Q, dO and the previous dS are there for every warp, and every warp has read the other stages
        if (i + 1 < tiles) copy(i + 1);
        if (i > 1) end_turn(added);
        if (i > 0) add_dq(i - 1, before);

        const Stage &stage = shared.stage[i % 2];
        const RowNumbers<block_m> &numbers = shared.numbers[i % 2];
        const Weights weights{p, mask, tile.batch, at.head, score.scale, alibi_slope<alibi>(p, tile.batch, at.head)};
        dtype *ds = shared.ds[i % 2];
        const WholeLetters<warp_keys, warp_rows> letters{has_mailboxes ? reinterpret_cast<dtype *>(&shared + 1) : ds, pair};
        for (int row = 0; row < block_m; row += warp_rows) {
            rows.reader.start(has_values ? stage.q : stage.dout, row);
            columns.reader.start(has_values ? stage.dout : stage.q, row);
            Accumulator<warp_keys, warp_rows> s;
            HeldA<warp_keys, warp_rows> operand;
            const int this_key = first_key + warp_key, this_row = at.number * block_m + row;
            if (dropout) dropping.of_head(p, tile.batch, at.head);
            if (has_values) {
                // S^T = K Q^T, P^T = 2^(score - lse)
                s.clear();
                gemm<dtype, head_dim>(s, keys, rows);
                score.apply(s);
                weights.exponentiate<dtype>(s, numbers.lse + row, this_key, this_row, operand);
                letters.post(s, row);
                if constexpr (dropout)
                    dropping.each_pair<true, warp_keys, warp_rows>(this_row, this_key, [&](int step, int m, int i, uint32_t kept) {
                        operand.block[step][m][i] &= kept;
                    });
            } else {
                // dP^T - delta = V dO^T - delta; with dropout delta comes later, as it counts where dP does not
                if constexpr (dropout)
                    s.clear();
                else
                    each_row_of_q(s, numbers.delta + row, [](float &gradient, float row_delta) { gradient = -row_delta; });
                gemm<dtype, head_dim>(s, keys, rows);
                if constexpr (dropout) drop_and_subtract(dropping, s, numbers.delta + row, this_row, this_key);
                // dS^T = P^T * (dP^T - delta), where the letter has P^T times the slope of what scores become
                letters.multiply(s, row);
                operand = round_to_operand<dtype>(s);
                __syncwarp();  // every lane has read its letter, and dS may take its place
                if constexpr (wants_dq) store_operand<STile>(ds, warp_key, row, operand);
            }
            // dV += P^T dO, dK += dS^T Q
            if constexpr (wants_dkv) gemm<dtype, warp_rows>(sum, operand, columns);
        }
        added = before;
        before = at;
        at.advance(first_tile, end_tile);
    }

    __syncthreads();  // the last dS is there
    if (tiles > 1) end_turn(added);
    add_dq(tiles - 1, before);
    if (!wants_dkv) return;

    __syncthreads();  // every warp has read K
    end_turn(before);
    if (has_values) {
        if constexpr (dropout) scale(sum, dropping.rescale);
        store_sum(shared.v, warp_key, dv, p.dv_stride.row, end_key, sum);
    } else {
        scale(sum, p.softmax_scale);
        store_sum(shared.k, warp_key, dk, p.dk_stride.row, end_key, sum);
    }
}

// The gradients of tensors that the score reads, as far as they come of a tile of keys and a head of Q: dS once more, as here
// one warp has a score and its gradient.
template <class Mods>
__device__ void sum_slopes(const Params &p, const CountedWorkspaces &workspaces, Shared &shared) {
    constexpr int half = block_m / 2, part_rows = warp_rows < half ? warp_rows : half;
    const Work work{p, static_cast<int>(blockIdx.z)};
    KeyBounds mask{p};
    if constexpr (packed) mask.take(work.seqlen_q, work.seqlen_k);
    const int head = blockIdx.y, head_k = head / (p.num_heads / p.num_heads_k);
    const int first_key = blockIdx.x * block_n, end_key = min(block_n, work.seqlen_k - first_key);
    if (packed && end_key <= 0) return;
    const int end_tile = end_row_tile(mask, first_key + end_key - 1);

    PanelCopier<KTile, num_warps, dtype> k_copier, v_copier;
    k_copier.start(shared.k, work.like_k(p.k, p.k_stride, head_k), p.k_stride.row);
    v_copier.start(shared.v, work.like_k(p.v, p.v_stride, head_k), p.v_stride.row);
    k_copier.copy_rows(blockIdx.x, end_key);
    v_copier.copy_rows(blockIdx.x, end_key);
    RowCopier q_copier, dout_copier;

    // Two warps share the keys of a pair, and each has half of the rows.
    const int warp = uniform_warp_index(), warp_key = warp % num_pairs * warp_keys, warp_row = warp / num_pairs * half;
    QOperand<warp_keys, head_dim, 2, HoistedReader<KTile, dtype>> keys, values;
    KOperand<part_rows, head_dim, 2, HoistedReader<QTile, dtype, ByRow>> rows;
    keys.start(shared.k, warp_key);
    values.start(shared.v, warp_key);
    const Softcap<softcap> score{p};
    const Dropout<dropout> dropping{p, work.batch, head};
    const Weights weights{p, mask, work.batch, head, score.scale, alibi_slope<alibi>(p, work.batch, head)};
    const Stage &stage = shared.stage[0];
    const RowNumbers<block_m> &numbers = shared.numbers[0];
    SlopeSums<Mods> sums;
    for (QueryTile at{head, first_row_tile(mask, first_key)}; at.number < end_tile; ++at.number) {
        __syncthreads();  // every warp has read the tile before
        copy_rows(shared.stage[0], shared.numbers[0], work, workspaces, at, q_copier, dout_copier);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();  // K, V, Q and dO are there for every warp
#pragma unroll 1
        for (int row = warp_row; row < warp_row + half; row += part_rows) {
            const int this_key = first_key + warp_key, this_row = at.number * block_m + row;
            Accumulator<warp_keys, part_rows> s, gradients;
            s.clear();
            rows.reader.start(stage.q, row);
            gemm<dtype, head_dim>(s, keys, rows);
            score.apply(s);
            gradients.clear();
            rows.reader.start(stage.dout, row);
            gemm<dtype, head_dim>(gradients, values, rows);
            if constexpr (dropout)
                drop_and_subtract(dropping, gradients, numbers.delta + row, this_row, this_key);
            else
                each_row_of_q(gradients, numbers.delta + row, [](float &gradient, float row_delta) { gradient -= row_delta; });
            weights.each(s, numbers.lse + row, this_key, this_row,
                         [&](int m, int n, int i, const Place &place, float of_s, float weight) {
                             if (weight != 0.0f) sums.add(p, place, of_s, weight * gradients.block[m][n][i]);
                         });
        }
    }
    sums.finish(p, {work.batch, head, 0, 0, work.seqlen_q, work.seqlen_k});
}

FLASHLADDER_KERNEL(backward_of_tensors, Params,
                   Launch{num_threads, sizeof(Shared), block_m, block_n}.over("cdiv(seqlen_k, block_n)", "num_heads * ('gradients=' in mods)", "batch"));
extern "C" __global__ void __launch_bounds__(num_threads)
    backward_of_tensors(const __grid_constant__ Params p, const __grid_constant__ CountedWorkspaces workspaces) {
    extern __shared__ __align__(128) char shared_memory[];
    if constexpr (has_gradients) sum_slopes<Mods>(p, workspaces, *reinterpret_cast<Shared *>(shared_memory));
}

FLASHLADDER_KERNEL(backward_finish, Params,
                   Launch{num_threads, QTile::size * sizeof(dtype), block_m}.over("cdiv(seqlen_q, block_m) * wants_dq", "num_heads", "batch"));
extern "C" __global__ void __launch_bounds__(num_threads)
    backward_finish(const __grid_constant__ Params p, const __grid_constant__ CountedWorkspaces workspaces) {
    extern __shared__ __align__(128) char shared[];
    dtype *shared_dq = reinterpret_cast<dtype *>(shared);
    const Work work{p, static_cast<int>(blockIdx.z)};
    const int head = blockIdx.y, first_row = blockIdx.x * block_m;
    if (packed && first_row >= work.seqlen_q) return;

    auto dq = load_fragments<dq_rows, dq_cols>(workspaces.dq_sum + work.padded_row(head, blockIdx.x) * head_dim);
    scale(dq, p.softmax_scale);
    store_block_to_shared<QTile>(shared_dq, warp_index() % dq_warps * dq_rows, warp_index() / dq_warps * dq_cols, dq);
    __syncthreads();  // the tile is whole
    store_rows_before<QTile, block_m / num_warps, StoreDefault>(
        work.seqlen_q - first_row, work.like_q(p.dq, p.dq_stride, head) + first_row * p.dq_stride.row,
        p.dq_stride.row, shared_dq, warp_index() * (block_m / num_warps));
}
