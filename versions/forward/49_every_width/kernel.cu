// Attention for every head_dim and option. The roles of a CTA, which takes one work tile after the other:
//
//     scheduler, a warp        draws a work tile, and puts into `work` where it is
//     producer, one thread     has TMA load Q of the work tile, and K and V block by block, the last keys first
//     drawers, 2 or 4 warps    with dropout alone: draw into `masks` which weights of a block are kept
//     consumers, warpgroups    S = Q K^T, P, O += P V; O / l goes where Q was, and TMA stores it from there. Where Q has one
//                              place they store it themselves, so the next Q comes while the last P V sums
//
// l, the sum of P, is a column of O where V has a column of ones beside it; else threads sum P, as it will be rounded.
//
// A consumer's turn for block j. A product that is started runs on until it is waited for:
//
//     waits for K of j         starts S = Q K^T of block j
//     waits for V of j + 1     starts O += P V of block j + 1
//     waits for S              P of block j, by the softmax, while P V runs; then K is released
//     waits for O              V is released; O follows m; P is rounded for the next turn
//
// The first block has no P V before it, and behind the last one comes a P V alone. What the mbarriers say:
//
//     q, k, v    full: TMA has brought the tile. empty: no consumer warp needs it, and O has been read from the place of Q
//     work       wanted: the producer will soon need a work tile. full: it is there. empty: no consumer or drawer needs it
//     masks      full: the block's mask is drawn. empty: its consumer warp has it
#include "48_column_of_ones/column_of_ones.cuh"
#include "48_column_of_ones/drawn_mask.cuh"
#include "48_column_of_ones/lagging_softmax.cuh"
#include "49_every_width/rows_of_o.cuh"
#include "49_every_width/slope.cuh"
#include "config.cuh"
#include "launch.cuh"
#include "softmax/dropout.cuh"
#include "softmax/mask.cuh"
#include "softmax/sinks.cuh"
#include "pipeline/pipeline.cuh"
#include "pipeline/roles.cuh"
#include "schedule/order.cuh"
#include "schedule/work_tile.cuh"
#include "softmax/softcap.cuh"
#include "tile/warpgroup_gemm.cuh"

#include <type_traits>

using namespace config;

constexpr int num_consumers = block_m / warpgroup_rows;  // warpgroups; then comes the producer's
constexpr bool is_wide = head_dim > 128;
constexpr int drawers = is_wide ? 2 : 4;      // warps. Wide O leaves no registers for a warpgroup: they are of the producer's
constexpr int mask_stages = dropout ? 4 : 0;  // how many blocks of keys ahead they may be
constexpr int of_producer = dropout && is_wide ? 56 : (dropout || head_dim_v > 128) ? 24
                                                                                    : 32;  // registers
using Share = Registers<num_consumers, 1, of_producer, dropout && !is_wide, 40>;
constexpr bool is_uneven = causal && !window;           // within a window all tiles see about as many keys
constexpr bool ends_early = causal || window;           // a row may see no later key
constexpr bool may_halve = ends_early && block_n > 80;  // a block of 64 keys is on the diagonal of 64 rows whole
constexpr bool stores_by_tma = q_stages > 1;            // O
// In a product of 256 columns at most. With dropout ones would sum what is left of P.
constexpr bool has_ones = ones && !dropout && head_dim_v < 256;
constexpr bool sums_apart = !has_ones && !dropout;  // by threads; with dropout P is summed where it is rounded

using QTile = SwizzledPanels<block_m, head_dim>;
using OTile = SwizzledPanels<block_m, head_dim_v>;  // in the place of Q
using KTile = SwizzledPanels<block_n, head_dim>;
constexpr int v_panel = head_dim_v % 64 ? 32 : 64;  // columns: V fills its panels, as ones begin behind them
using VPanels = SwizzledPanels<block_n, head_dim_v, v_panel>;
using VTile = std::conditional_t<has_ones, WithOnes<VPanels>, VPanels>;
using QPipeline = Pipeline<QTile, q_stages>;
using KPipeline = Pipeline<KTile, num_stages>;
using VPipeline = Pipeline<VTile, num_stages>;
using Masks = MaskRing<block_n, num_consumers * 4, mask_stages, drawers>;
using HeldQ = QOperand<16, head_dim, 0, HoistedReader<QTile, dtype>>;
using Q = std::conditional_t<q_in_registers, HeldQ, ByRows<QTile>>;
using K = OperandConsumer<KPipeline, ByRows<KTile>>;
using V = OperandConsumer<VPipeline, ByColumns<VTile>>;
using S = Accumulator<16, block_n>;
using P = HeldA<16, block_n>;
using O = Accumulator<16, head_dim_v + (has_ones ? ones_columns : 0)>;  // and the sum of P
using Kept = DrawnMask<dtype, Masks, dropout>;
using Softmax = LaggingSoftmax<dtype, lse>;
using Scores = SlopingScores<softcap, alibi, polynomial_tanh>;

struct Shared {
    alignas(1024) dtype q_tiles[q_stages][QTile::size];  // and O
    alignas(1024) dtype k_tiles[num_stages][KTile::size], v_tiles[num_stages][VTile::size];
    QPipeline q;
    KPipeline k;
    VPipeline v;
    WorkTileQueue work;
    Masks masks;
};
FLASHLADDER_COUNTERS(tiles_drawn, "1");
struct Counters {
    unsigned *tiles_drawn;
};
using Tensors = std::conditional_t<packed, PackedParams, AttentionParams>;
using BoundedTensors = std::conditional_t<window || softcap, Bounded<Tensors>, Tensors>;
using BiasedTensors = std::conditional_t<alibi, Biased<BoundedTensors>, BoundedTensors>;
using SinkingTensors = std::conditional_t<sinks, Sinking<BiasedTensors>, BiasedTensors>;
using DroppingTensors = std::conditional_t<dropout, Dropping<SinkingTensors>, SinkingTensors>;
using Params = std::conditional_t<stores_by_tma, DroppingTensors, Narrower<DroppingTensors>>;
using Maps = std::conditional_t<stores_by_tma, QkvoMaps, QkvMaps>;
using Order = std::conditional_t<packed, PackedOrder<block_m, head_dim, is_uneven, head_dim_v>,
                                 DenseOrder<block_m, head_dim, is_uneven, head_dim_v>>;
constexpr Launch loading = Launch{Share::num_threads, sizeof(Shared), block_m, block_n}
                               .persistent()
                               .by_tma("q", block_m, 64, 128)
                               .by_tma("k", block_n, 64, 128)
                               .by_tma("v", block_n, v_panel, v_panel * 2);
constexpr Launch plain = stores_by_tma ? loading.by_tma("o", 16, 64, 128) : loading;
FLASHLADDER_KERNEL(attention_forward, Params, packed ? plain.over("total_q // block_m + batch + 1", "num_heads", "1") : plain);

// The producer, one thread: Q of each work tile, and the blocks of K and V that it sees, from the last to the first.
__device__ inline void load(Shared &shared, const Maps &maps, Mask<causal, window> mask) {
    auto q = shared.q.producer();
    auto k = shared.k.producer(), v = shared.v.producer();
#pragma unroll 1
    for (WorkTileReader work{shared.work};; work.advance()) {
        const WorkTile &tile = work.wait();
        if (tile.first_row == WorkTile::none) return;
        if constexpr (packed) mask.take(tile.seqlen_q, tile.seqlen_k);
        const int head_k = tile.head_k, row_k = tile.row_k, batch_k = tile.batch_k;
        const int last = mask.template blocks<block_n>(tile.end_row) - 1;
        const int lowest = mask.template first_block<block_n>(tile.first_row);
        if (last >= 0) shared.k.load(k, shared.k_tiles, maps.k, row_k + last * block_n, head_k, batch_k);
        shared.q.load(q, shared.q_tiles, maps.q, tile.row_q + tile.first_row, tile.head, tile.batch_q);
#pragma unroll 1
        for (int j = last; j >= lowest; --j) {
            if (j > lowest) shared.k.load(k, shared.k_tiles, maps.k, row_k + (j - 1) * block_n, head_k, batch_k);
            shared.v.load(v, shared.v_tiles, maps.v, row_k + j * block_n, head_k, batch_k);
            // Not earlier: another CTA may be free for the next tile sooner.
            if (j == min(last, lowest + 2)) shared.work.request();
        }
        if (last < 0) shared.work.request();
    }
}

// A drawer, a whole warp: masks of each work tile, of the blocks that the producer loads.
__device__ inline void draw(Shared &shared, const Params &params, Mask<causal, window> mask) {
    Dropout<dropout> dropping{params, 0, 0};
    auto masks = shared.masks.producer();
    WorkTileReader work{shared.work};
    for (int first_row; (first_row = work.first_row()) != WorkTile::none;) {
        if constexpr (packed) mask.take(work.get(&WorkTile::seqlen_q), work.get(&WorkTile::seqlen_k));
        const int last = mask.template blocks<block_n>(work.get(&WorkTile::end_row)) - 1;
        const int lowest = mask.template first_block<block_n>(first_row);
        if constexpr (dropout) dropping.of_head(params, sequence_of(params, work), work.get(&WorkTile::head));
        work.advance();
        __syncwarp();  // all lanes have read the tile
        work.release(true);
#pragma unroll 1
        for (int j = last; j >= lowest; --j) shared.masks.draw(masks, dropping, first_row, j * block_n);
    }
}

// Rows of a warp.
struct Rows {
    int of_tile, of_warp;  // the tile's first row, and the warp's within it
    int end;               // of its warpgroup
    __device__ int first() const { return of_tile + of_warp; }
};

// O += P V over the blocks of keys from `last` down to `lowest`. The caller's `recompute` brings back scores; `on_begun` comes
// behind the first block's softmax, and `beside_last` while the last P V sums. With
// every option it and `attend` are too long to be inlined by themselves, and products that cross a call run one by one.
template <class Lowest, class Recompute, class OnBegun, class BesideLast>
__device__ __forceinline__ void attend_blocks(O &o, S &s, P &p, Q &q, K &k, V &v, Kept &kept, Softmax &softmax,
                                              const Scores &scores, const Mask<causal, window> &mask, const Rows &rows,
                                              int last, Lowest lowest, Recompute recompute, OnBegun on_begun,
                                              BesideLast beside_last) {
    // Or the descriptor of each 16 columns of Q takes registers from turn to turn. Beside wide O there are none left.
    auto forget_steps = [](auto &q) {
        if constexpr (is_wide && !q_in_registers) stay_here(q.first);
    };
    auto start_pv = [&](auto &p) {  // O += P V of a block
        v.wait();
        start_sum<dtype>(o, p, v.operand());
    };
    // Before P is an operand. It is summed as it will be rounded: keys that weigh alike are all rounded to the same side.
    auto weigh = [&](auto &s) {
        if constexpr (sums_apart) {
            softmax.sum_rounded(s);
            stay_here(s);  // or the operand, which belongs behind the wait for O, would be what was summed
        }
        kept.round(s, softmax);
    };
    auto step = [&](int j, auto is_masked, auto &p_before) {
        constexpr bool masked = decltype(is_masked)::value;
        forget_steps(q);
        k.wait();
        start_product<dtype, head_dim>(s, q, k.operand());  // S = Q K^T of block j
        start_pv(p_before);                                 // of the one before
        kept.take();                                        // while both sum

        wait_for<1>(s);
        constexpr bool in_line = causal && !masked;  // all keys come before the rows' own
        constexpr bool capped_by_softmax = polynomial_tanh && !masked && (in_line || !alibi);  // nothing comes between
        if constexpr (!capped_by_softmax) scores.apply(s);
        if constexpr (!in_line) scores.add_slope(s, rows.first(), j * block_n);
        if constexpr (masked) mask.hide(s, rows.first(), j * block_n);
        if (masked && softmax.has_new_rows()) softmax.begin_new_rows(s);
        const auto bring_back = [&](const bool (&lost)[2]) { recompute(s, lost, j * block_n); };
        softmax.update(s, bring_back, scores.template line<in_line>(rows.first(), j * block_n),
                       scores.template cap<capped_by_softmax>());  // P = 2^(S - m)
        k.release(softmax.is_computed());  // so P comes before the wait for O: ptxas would turn them round
        weigh(s);
        if constexpr (dropout) v.wait();  // for ptxas, which would round behind the wait for O
        wait_for(o, p_before);
        v.release();
        softmax.rescale(o);
        p = kept.rounded(s);
    };
    int j = last - 1;
    // The first block's first keys. The last of a warpgroup's rows sees 63 keys more than the first, and a block has 64 at
    // least, so the second block is masked too, and no other one.
    auto begin = [&](auto keys) {
        Accumulator<16, decltype(keys)::value> s;
        k.wait();
        start_product<dtype, head_dim>(s, q, k.operand());
        kept.take();
        wait_for(s);
        k.release();  // not as late as in `step`: `start` takes the maxima, so no scores can be lost
        scores.apply(s);
        scores.add_slope(s, rows.first(), last * block_n);
        mask.hide(s, rows.first(), last * block_n);
        softmax.start(s);
        on_begun();
        weigh(s);
        auto p_first = kept.rounded(s);
        if (ends_early && j >= lowest)
            step(j--, std::true_type(), p_first);
        else
            p = widen<block_n>(p_first);
    };
    using Half = std::integral_constant<int, may_halve ? warpgroup_rows : block_n>;
    using Whole = std::integral_constant<int, block_n>;
    if (may_halve && mask.keys(rows.end - 1) - last * block_n <= warpgroup_rows)
        begin(Half());
    else
        begin(Whole());
    const auto lowest_plain = mask.template first_plain_block<block_n>(rows.end - 1);
    for (; j >= lowest_plain; --j) step(j, std::false_type(), p);
    if constexpr (window)
        for (; j >= lowest; --j) step(j, std::true_type(), p);
    start_pv(p);
    beside_last();
    wait_for(o, p);
    v.release();
}

// A consumer warpgroup: 64 rows of O of each work tile.
__device__ __forceinline__ void attend(Shared &shared, const Params &params, const Maps &maps, Mask<causal, window> mask,
                                       Scores scores) {
    const int warp_row = uniform_warp_index() * 16;
    const int group_row = __shfl_sync(0xffffffff, warpgroup_index(), 0) * warpgroup_rows;
    K k(shared.k, shared.k_tiles[0]);
    V v(shared.v, shared.v_tiles[0]);
    WorkTileReader work{shared.work};
    auto q_at = shared.q.consumer();
    Kept kept(shared.masks);
    Softmax softmax{scores.scale};
    // O lies where its tile's Q was. So that place is free amid the next tile, when O is stored. Only lane 0, which stores it,
    // has to wait.
    auto q_before = q_at;
    q_before.stage = q_stages - 1;
    auto release_q_before = [&] {
        if constexpr (!stores_by_tma) return;
        tma_store_wait_read();
        shared.q.release(q_before, work.count > 0);
    };
    int tile_row = work.first_row(), next_row;
    for (; tile_row != WorkTile::none; tile_row = next_row) {
        if constexpr (packed) mask.take(work.get(&WorkTile::seqlen_q), work.get(&WorkTile::seqlen_k));
        const int end_of_tile = work.get(&WorkTile::end_row);
        const int of_tile = mask.template blocks<block_n>(end_of_tile) - 1;
        const int first_row = tile_row + group_row, end_row = min(first_row + warpgroup_rows, end_of_tile);
        const bool has_rows = first_row < end_row;
        const auto lowest_of_tile = mask.template first_block<block_n>(tile_row);
        const auto lowest = mask.template first_block<block_n>(first_row);
        const int last = (has_rows ? mask.template blocks<block_n>(end_row) : int(lowest_of_tile)) - 1;
        // What needs no O
        RowsOfO<stores_by_tma> o_rows;
        Sink<sinks> sink;
        auto finalize = [&] {
            if constexpr (!stores_by_tma) shared.q.release(q_at);  // no scores can be lost any more
            o_rows.take(work, tile_row + warp_row);
            sink.take(params, o_rows.head);
            float *lse_to = work.lse() + tile_row + warp_row;
            work.advance();
            next_row = work.first_row();  // its wait ends a piece of code, so the rest stays behind the products' start
            __syncwarp();                 // all lanes have read the tile before
            if constexpr (lse) softmax.store_lse_if(params.lse != nullptr, lse_to, end_row - tile_row - warp_row, sink);
            work.release(softmax.is_computed());
        };
        // Blocks that only other warpgroups see
        auto skip = [&](int from, int to) {
#pragma unroll 1
            for (int j = from; j > to; --j) k.skip(), v.skip(), kept.skip();
        };
        scores.take(params, work, mask);
        skip(of_tile, last);
        shared.q.wait(q_at);

        O o;
        o.clear();
        softmax.reset();
        if (last >= lowest) {
            S s;
            P p;
            Q q;
            q.start(shared.q_tiles[q_at.stage], q_in_registers ? warp_row : group_row);
            // The rarest path: scores of lost rows once more, some columns at a time, as few registers are free.
            auto recompute = [&](S &s, const bool (&lost)[2], int first_key) {
                const dtype *k_tile = shared.k_tiles[k.at.stage];
#pragma unroll
                for (int col = 0; col < block_n; col += 16) {
                    Accumulator<16, 16> part;
                    scores_of_warp<KTile>(part, q, k_tile + KTile::step(col, 0), shared.q_tiles[q_at.stage], warp_row);
                    scores.apply(part);
                    scores.add_slope(part, tile_row + warp_row, first_key + col);
                    mask.hide(part, tile_row + warp_row, first_key + col);
                    take_rows(s, col, part, lost);
                }
            };
            attend_blocks(o, s, p, q, k, v, kept, softmax, scores, mask, Rows{tile_row, warp_row, end_row}, last, lowest,
                          recompute, release_q_before, finalize);
            if constexpr (window) skip(lowest, lowest_of_tile);
        } else {
            release_q_before();
            finalize();
        }

        if (has_rows) {
            const auto row_sum = [&](int h) { return sums_apart ? quad_sum(softmax.row_w(h)) : softmax.row_w(h); };
            const auto divided = [&] {
                if constexpr (has_ones)
                    return divide_by_sums(o, softmax, sink);
                else
                    return divide_by<head_dim_v>(o, row_sum, softmax, sink, Dropout<dropout>::share(params));
            }();
            o_rows.store<OTile>(shared.q_tiles[q_at.stage], warp_row, end_row - tile_row - warp_row, params, maps, divided);
        }
        if constexpr (stores_by_tma) q_at.advance();
    }
    if constexpr (stores_by_tma) wait_for_stores();  // shared memory lives as long as its CTA
}

extern "C" __global__ void __launch_bounds__(Share::num_threads, 1)
    attention_forward(const __grid_constant__ Params params, const __grid_constant__ Counters counters,
                      const __grid_constant__ Maps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);

    Mask<causal, window> mask(params);
    const Scores scores(params);
    if (threadIdx.x == 0) {
        shared.q.init(num_consumers * 4);
        shared.k.init(num_consumers * 4);
        shared.v.init(num_consumers * 4);
        shared.work.init(num_consumers * 4 + (dropout ? drawers : 0));
        shared.masks.init();
        fence_mbarrier_init();
    }
    if constexpr (has_ones) write_ones<VTile>(shared.v_tiles);
    __syncthreads();  // the barriers and the ones are made

    if (warpgroup_index() == num_consumers) {
        release_registers<Share::producer>();
        if (uniform_warp_index() == num_consumers * 4 + 1) schedule(shared.work, counters.tiles_drawn, Order(params));
        if (threadIdx.x % warpgroup_threads == 0) load(shared, maps, mask);
        if constexpr (dropout && is_wide)
            if (uniform_warp_index() >= num_consumers * 4 + 2) draw(shared, params, mask);
        return;
    }
    if constexpr (dropout && !is_wide)
        if (warpgroup_index() > num_consumers) {
            release_registers<Share::helper>();
            draw(shared, params, mask);
            return;
        }
    take_registers<Share::consumer>();
    attend(shared, params, maps, mask, scores);
}
