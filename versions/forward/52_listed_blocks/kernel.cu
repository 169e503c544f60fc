// Rung 49, with a mask and a score that are expressions (rung 51). Where a mask is one, two kernels run:
//
//     list_blocks              evaluates it: of each block of keys, what each warpgroup's rows of a tile see and what not. The
//                              last CTA of a tile to be done lists the blocks that it sees: whole ones, and those seen in part
//     attention_forward        takes the blocks of the list, and no other one; it starts while lists are made
//
// The roles of a CTA of the last one, which takes one work tile after the other:
//
//     scheduler, a warp        draws a work tile, and puts into `work` where it is
//     producer, one thread     has TMA load Q of the work tile, and K and V block by block
//     drawers, 2 or 4 warps    with dropout alone: draw into `masks` which weights of a block are kept
//     consumers, warpgroups    S = Q K^T, P, O += P V; O / l goes where Q was, and TMA stores it from there. Where Q has one
//                              place they store it themselves, so the next Q comes while the last P V sums
//
// Blocks are counted down. Of a list, first come those that a row sees in part: there the expression of the mask is
// evaluated. Then come whole ones, whose turns are rung 49's. A score by an expression is evaluated in both.
//
// A consumer's turn for block j. A product that is started runs on until it is waited for:
//
//     waits for K of j         starts S = Q K^T of block j
//     waits for V of j + 1     starts O += P V of block j + 1
//     waits for S              expressions; P of block j, by the softmax, while P V runs; then K is released
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
#include "51_any_mask/modified_scores.cuh"
#include "52_listed_blocks/block_lists.cuh"
#include "52_listed_blocks/feeders.cuh"
#include "52_listed_blocks/text.cuh"
#include "config.cuh"
#include "decode/cuda/arrivals.cuh"
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
constexpr bool is_uneven = (causal || has_mask) && !window;  // within a window all tiles see about as many keys
constexpr bool ends_early = causal || window;           // a row may see no later key
// A block of 64 keys is on the diagonal of 64 rows whole. What a list has is not on the diagonal.
constexpr bool may_halve = ends_early && block_n > 80 && !has_mask;
constexpr bool stores_by_tma = q_stages > 1;            // O
constexpr bool names_b = (has_mask && mask_names_b) || (has_score && score_names_b);
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
using Places = std::conditional_t<packed, PackedLists<block_m, block_n, is_uneven, has_mask && mask_names_h>,
                                  DenseLists<block_m, block_n, is_uneven, has_mask && mask_names_b, has_mask && mask_names_h>>;
using Blocks = std::conditional_t<has_mask, ListedBlocks<block_n, Places>, BlocksInRange<block_n, Mask<causal, window>>>;

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
// Where a mask is an expression: tiles that have lists, what is known of their blocks, and the lists.
constexpr Text<48> tiles{!has_mask ? "0" : packed ? "(total_q // block_m + batch + 1)"
                                                  : "cdiv(seqlen_q, block_m)",
                         mask_names_b && !packed ? " * batch" : "", mask_names_h ? " * num_heads" : ""};
FLASHLADDER_WORKSPACE_OF(classes, unsigned char, (Count{tiles.of, " * cdiv(seqlen_k, block_n)"}));
FLASHLADDER_WORKSPACE_OF(lists, int, (Count{tiles.of, " * (cdiv(seqlen_k, block_n) + 8)"}));
FLASHLADDER_WORKSPACE_OF(numbers, int, (Count{has_mask && packed ? "total_q" : "0"}));
FLASHLADDER_COUNTERS_OF(done, (Count{"cdiv(", tiles.of, ", 256) * 256"}));  // CTAs, of a tile; of few sizes, as they are kept
struct Lent {
    unsigned *tiles_drawn;
    unsigned char *classes;
    int *lists, *numbers;
    unsigned *done;
};
using Tensors = std::conditional_t<packed, PackedParams, AttentionParams>;
using BoundedTensors = std::conditional_t<window || softcap, Bounded<Tensors>, Tensors>;
using BiasedTensors = std::conditional_t<alibi, Biased<BoundedTensors>, BoundedTensors>;
using SinkingTensors = std::conditional_t<sinks, Sinking<BiasedTensors>, BiasedTensors>;
using DroppingTensors = std::conditional_t<dropout, Dropping<SinkingTensors>, SinkingTensors>;
using Params = Reading<std::conditional_t<stores_by_tma, DroppingTensors, Narrower<DroppingTensors>>>;
using Modified = ModifiedScores<Mods, has_mask, has_score, Params, Mask<causal, window>>;
using Maps = std::conditional_t<stores_by_tma, QkvoMaps, QkvMaps>;
using Order = std::conditional_t<packed, PackedOrder<block_m, head_dim, is_uneven, head_dim_v>,
                                 DenseOrder<block_m, head_dim, is_uneven, head_dim_v>>;
constexpr Launch loading = Launch{Share::num_threads, sizeof(Shared), block_m, block_n}
                               .persistent()
                               .by_tma("q", block_m, 64, 128)
                               .by_tma("k", block_n, 64, 128)
                               .by_tma("v", block_n, v_panel, v_panel * 2);
constexpr Launch plain = stores_by_tma ? loading.by_tma("o", 16, 64, 128) : loading;
// A warp for each block of a tile. Without a mask there is no list to make, nor a CTA.
constexpr int classifiers = 8;
constexpr Launch listing = Launch{classifiers * 32, 0, block_m, block_n * classifiers};
constexpr Launch over_tiles = packed ? plain.over("total_q // block_m + batch + 1", "num_heads", "1") : plain;
FLASHLADDER_KERNEL(list_blocks, Params, listing.over(tiles.of, "cdiv(seqlen_k, block_n)", "1"));
FLASHLADDER_KERNEL(attention_forward, Params, has_mask ? over_tiles.dependent() : over_tiles);

// A warp: the class of a block of a list's tile. The last CTA of the tile: its list.
extern "C" __global__ void __launch_bounds__(classifiers * 32)
    list_blocks(const __grid_constant__ Params params, const __grid_constant__ Lent lent) {
    if constexpr (has_mask) {
        launch_dependents();
        const Places places(params, lent.numbers);
        const int number = blockIdx.x, j = blockIdx.y * classifiers + warp_index();
        const ListedTile tile = places.tile(params, number);
        const int blocks = places.blocks_of(tile), ctas = max((blocks + classifiers - 1) / classifiers, 1);
        if (blockIdx.y >= ctas) return;
        unsigned char *classes = places.classes(lent.classes, number);
        if (j < blocks) {
            Mask<causal, window> mask(params);
            mask.take(tile.seqlen_q, tile.seqlen_k);
            const unsigned found = class_of<block_n, Mods>(params, mask, tile.place(), tile.first_row, tile.end_row, j);
            if (lane_index() == 0) classes[j] = found;
        }
        if (!is_last_of(ctas, lent.done + number)) return;
        write_list<classifiers>(*places.list(lent.lists, number), classes, blocks);
        places.note(tile, number);
    }
}

__device__ inline Blocks blocks_of(const Params &params, const Lent &lent, const Mask<causal, window> &mask) {
    if constexpr (has_mask)
        return {Places(params, lent.numbers), lent.lists};
    else
        return {mask};
}

// Rows of a warp.
struct Rows {
    int of_tile, of_warp;  // the tile's first row, and the warp's within it
    int end;               // of its warpgroup
    __device__ int first() const { return of_tile + of_warp; }
};

// O += P V over the blocks from `last` down to `lowest`. The caller's `recompute` brings back scores; `on_begun` comes behind the
// first block's softmax, and `beside_last` while the last P V sums. With every option it and `attend` are too long to be
// inlined by themselves, and products that cross a call run one by one.
template <class Blocks, class Lowest, class Recompute, class OnBegun, class BesideLast>
__device__ __forceinline__ void attend_blocks(O &o, S &s, P &p, Q &q, K &k, V &v, Kept &kept, Softmax &softmax, const Scores &scores,
                                              const Modified &modified, const Mask<causal, window> &mask, const Blocks &blocks,
                                              const Rows &rows, int last, Lowest lowest, Recompute recompute,
                                              OnBegun on_begun, BesideLast beside_last) {
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
        constexpr bool in_line = causal && !masked && !has_score;  // all keys come before the rows' own
        constexpr bool capped_by_softmax = polynomial_tanh && !masked && !has_score && (in_line || !alibi);  // nothing comes between
        if constexpr (!capped_by_softmax) scores.apply(s);
        if constexpr (!in_line) scores.add_slope(s, rows.first(), blocks.first_key(j));
        modified.template apply<masked, has_mask && masked>(s, rows.first(), blocks.first_key(j));
        if constexpr (masked) mask.hide(s, rows.first(), blocks.first_key(j));
        if (masked && softmax.has_new_rows()) softmax.begin_new_rows(s);
        const auto bring_back = [&](const bool (&lost)[2]) { recompute(s, lost, blocks.first_key(j), is_masked); };
        softmax.update(s, bring_back, scores.template line<in_line>(rows.first(), blocks.first_key(j)),
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
    // The first block's first keys. Without a list the last of a warpgroup's rows sees 63 keys more than the first, and a block
    // has 64 at least, so the second block is masked too, and no other one.
    auto begin = [&](auto keys) {
        Accumulator<16, decltype(keys)::value> s;
        k.wait();
        start_product<dtype, head_dim>(s, q, k.operand());
        kept.take();
        wait_for(s);
        k.release();  // not as late as in `step`: `start` takes the maxima, so no scores can be lost
        scores.apply(s);
        scores.add_slope(s, rows.first(), blocks.first_key(last));
        modified.template apply<true>(s, rows.first(), blocks.first_key(last));
        mask.hide(s, rows.first(), blocks.first_key(last));
        softmax.start(s);
        on_begun();
        weigh(s);
        auto p_first = kept.rounded(s);
        if (ends_early && !has_mask && j >= lowest)
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
    // Of a list, those that are seen in part. A row that sees none of these has no m yet: to the softmax its scores of a whole
    // block are lost, so it asks for them once more. All warps of a warpgroup go through the same blocks.
    if constexpr (has_mask)
        for (const int num_whole = blocks.num_whole(); j >= num_whole; --j) step(j, std::true_type(), p);
    const auto lowest_whole = blocks.lowest_whole(rows.end - 1);
    for (; j >= lowest_whole; --j) step(j, std::false_type(), p);
    if constexpr (window && !has_mask)
        for (; j >= lowest; --j) step(j, std::true_type(), p);
    start_pv(p);
    beside_last();
    wait_for(o, p);
    v.release();
}

// A consumer warpgroup: 64 rows of O of each work tile.
__device__ __forceinline__ void attend(Shared &shared, const Params &params, const Maps &maps, Mask<causal, window> &mask,
                                       Scores scores, Blocks blocks) {
    const int warp_row = uniform_warp_index() * 16;
    const int group_row = __shfl_sync(0xffffffff, warpgroup_index(), 0) * warpgroup_rows;
    K k(shared.k, shared.k_tiles[0]);
    V v(shared.v, shared.v_tiles[0]);
    WorkTileReader work{shared.work};
    auto q_at = shared.q.consumer();
    Kept kept(shared.masks);
    Softmax softmax{has_score ? 1.0f : scores.scale};
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
    const int group = group_row / warpgroup_rows;
    const auto of_work = [&](auto what) { return work.get(what); };
    blocks.wait();
    blocks.take(of_work, tile_row, group);
    for (; tile_row != WorkTile::none; tile_row = next_row) {
        if constexpr (packed) mask.take(work.get(&WorkTile::seqlen_q), work.get(&WorkTile::seqlen_k));
        const int sequence = names_b ? sequence_of(params, work) : 0, head = work.get(&WorkTile::head);
        const int end_of_tile = work.get(&WorkTile::end_row);
        const int of_tile = blocks.of_tile(end_of_tile) - 1;
        const int first_row = tile_row + group_row, end_row = min(first_row + warpgroup_rows, end_of_tile);
        const bool has_rows = first_row < end_row;
        const auto lowest_of_tile = blocks.lowest(tile_row);
        const auto lowest = blocks.lowest(first_row);
        const int last = (has_rows ? blocks.of_group(end_row) : int(lowest_of_tile)) - 1;
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
            // Its list comes while the last P V sums. Of no tile it is the first list, which nobody uses.
            blocks.take(of_work, next_row, group);
            __syncwarp();  // all lanes have read the tile before
            if constexpr (lse) softmax.store_lse_if(params.lse != nullptr, lse_to, end_row - tile_row - warp_row, sink);
            work.release(softmax.is_computed());
        };
        // Blocks that only other warpgroups see
        auto skip = [&](int from, int to) {
#pragma unroll 1
            for (int j = from; j > to; --j) k.skip(), v.skip(), kept.skip();
        };
        scores.take(params, work, mask);
        const Modified modified{params, sequence, head, mask, scores.scale * ln_2};
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
            auto recompute = [&](S &s, const bool (&lost)[2], int first_key, auto is_masked) {
                constexpr bool masked = decltype(is_masked)::value;
                const dtype *k_tile = shared.k_tiles[k.at.stage];
#pragma unroll
                for (int col = 0; col < block_n; col += 16) {
                    Accumulator<16, 16> part;
                    scores_of_warp<KTile>(part, q, k_tile + KTile::step(col, 0), shared.q_tiles[q_at.stage], warp_row);
                    scores.apply(part);
                    scores.add_slope(part, tile_row + warp_row, first_key + col);
                    modified.template apply<masked, has_mask && masked>(part, tile_row + warp_row, first_key + col);
                    mask.hide(part, tile_row + warp_row, first_key + col);
                    take_rows(s, col, part, lost);
                }
            };
            attend_blocks(o, s, p, q, k, v, kept, softmax, scores, modified, mask, blocks, Rows{tile_row, warp_row, end_row}, last,
                          lowest, recompute, release_q_before, finalize);
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
    attention_forward(const __grid_constant__ Params params, const __grid_constant__ Lent lent,
                      const __grid_constant__ Maps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);

    Mask<causal, window> mask(params);
    const Scores scores(params);
    const Blocks blocks = blocks_of(params, lent, mask);
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
        if (uniform_warp_index() == num_consumers * 4 + 1) schedule(shared.work, lent.tiles_drawn, Order(params));
        if (threadIdx.x % warpgroup_threads == 0) load<packed>(shared, maps, mask, blocks);
        if constexpr (dropout && is_wide)
            if (uniform_warp_index() >= num_consumers * 4 + 2) draw<packed>(shared, params, mask, blocks);
        return;
    }
    if constexpr (dropout && !is_wide)
        if (warpgroup_index() > num_consumers) {
            release_registers<Share::helper>();
            draw<packed>(shared, params, mask, blocks);
            return;
        }
    take_registers<Share::consumer>();
    attend(shared, params, maps, mask, scores, blocks);
}
