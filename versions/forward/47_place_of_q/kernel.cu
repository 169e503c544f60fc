// Rung 46 with O in the place of Q. The roles of a CTA, which takes one work tile after the other:
//
//     scheduler, a warp        draws a work tile, and puts into `work` where it is
//     producer, one thread     has TMA load Q of the work tile, and K and V block by block, the last keys first
//     consumers, warpgroups    S = Q K^T, P, O += P V; O / l goes where Q was, and TMA stores it from there
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
//     work       wanted: the producer will soon need a work tile. full: it is there. empty: no consumer warp needs it
#include "config.cuh"
#include "epilogue/store_by_tma.cuh"
#include "launch.cuh"
#include "softmax/mask.cuh"
#include "pipeline/pipeline.cuh"
#include "pipeline/roles.cuh"
#include "schedule/order.cuh"
#include "schedule/work_tile.cuh"
#include "softmax/optimistic.cuh"
#include "softmax/softcap.cuh"
#include "tile/warpgroup_gemm.cuh"

#include <type_traits>

using namespace config;

constexpr int num_consumers = block_m / warpgroup_rows;  // warpgroups; then comes the producer's
using Share = Registers<num_consumers, 1>;
constexpr bool is_uneven = causal && !window;  // within a window all tiles see about as many keys
constexpr bool ends_early = causal || window;  // a row may see no later key
constexpr bool may_halve = ends_early && block_n > warpgroup_rows;  // a block of 64 keys is on the diagonal of 64 rows whole

using QTile = SwizzledPanels<block_m, head_dim>;
using OTile = SwizzledPanels<block_m, head_dim_v>;  // in the place of Q
using KTile = SwizzledPanels<block_n, head_dim>;
using VTile = SwizzledPanels<block_n, head_dim_v>;
using QPipeline = Pipeline<QTile, q_stages>;
using KPipeline = Pipeline<KTile, num_stages>;
using VPipeline = Pipeline<VTile, num_stages>;
using HeldQ = QOperand<16, head_dim, 0, HoistedReader<QTile, dtype>>;
using Q = std::conditional_t<q_in_registers, HeldQ, ByRows<QTile>>;
using K = OperandConsumer<KPipeline, ByRows<KTile>>;
using V = OperandConsumer<VPipeline, ByColumns<VTile>>;
using S = Accumulator<16, block_n>;
using P = HeldA<16, block_n>;
using O = Accumulator<16, head_dim_v>;

struct Shared {
    alignas(1024) dtype q_tiles[q_stages][QTile::size];  // and O
    alignas(1024) dtype k_tiles[num_stages][KTile::size], v_tiles[num_stages][VTile::size];
    QPipeline q;
    KPipeline k;
    VPipeline v;
    WorkTileQueue work;
};
FLASHLADDER_COUNTERS(tiles_drawn, "1");
struct Counters {
    unsigned *tiles_drawn;
};
using Tensors = std::conditional_t<packed, PackedParams, AttentionParams>;
using Params = std::conditional_t<window || softcap, Bounded<Tensors>, Tensors>;
using Order = std::conditional_t<packed, PackedOrder<block_m, head_dim, is_uneven, head_dim_v>,
                                 DenseOrder<block_m, head_dim, is_uneven, head_dim_v>>;
constexpr Launch plain = Launch{Share::num_threads, sizeof(Shared), block_m, block_n}
                             .persistent()
                             .by_tma("q", block_m, 64, 128)
                             .by_tma("k", block_n, 64, 128)
                             .by_tma("v", block_n, 64, 128)
                             .by_tma("o", 16, 64, 128);
FLASHLADDER_KERNEL(attention_forward, Params, packed ? plain.over("total_q // block_m + batch + 1", "num_heads", "1") : plain);

// The producer, one thread: Q of each work tile, and the blocks of K and V that it sees, from the last to the first.
__device__ inline void load(Shared &shared, const QkvoMaps &maps, Mask<causal, window> mask) {
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
        // K before Q, which may have to wait until O of the tile before the last has been stored from its place.
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

// Rows of a warp.
struct Rows {
    int of_tile, of_warp;  // the tile's first row, and the warp's within it
    int end;               // of its warpgroup
    __device__ int first() const { return of_tile + of_warp; }
};

// O += P V over the blocks of keys from `last` down to `lowest`. The caller's `recompute` brings back scores; `on_begun` comes
// behind the first block's softmax, and `beside_last` while the last P V sums.
template <class Lowest, class Recompute, class OnBegun, class BesideLast>
__device__ inline void attend_blocks(O &o, S &s, P &p, Q &q, K &k, V &v, OptimisticSoftmax &softmax,
                                     const Softcap<softcap> &scores, const Mask<causal, window> &mask, const Rows &rows,
                                     int last, Lowest lowest, Recompute recompute, OnBegun on_begun,
                                     BesideLast beside_last) {
    auto step = [&](int j, auto is_masked, auto &p_before) {
        constexpr bool masked = decltype(is_masked)::value;
        k.wait();
        start_product<dtype, head_dim>(s, q, k.operand());  // S = Q K^T of block j
        v.wait();
        start_sum<dtype>(o, p_before, v.operand());  // O += P V of the one before

        wait_for<1>(s);
        auto bound = [&] {
            scores.apply(s);
            if constexpr (masked) mask.hide(s, rows.first(), j * block_n);
        };
        bound();
        softmax.update(s, [&] { recompute(), bound(); }, masked && softmax.has_new_rows());  // P = 2^(S - m), in s
        // Until here `recompute` may need K. The condition is always true, and holds P before the wait for O: ptxas would turn
        // them round.
        k.release(softmax.is_summed());
        wait_for(o, p_before);
        v.release();
        softmax.rescale(o);
        p = round_to_operand<dtype>(s);
    };
    int j = last - 1;
    // The first block's first keys. The last of a warpgroup's rows sees 63 keys more than the first, and a block has 64 at
    // least, so the second block is masked too, and no other one.
    auto begin = [&](auto keys) {
        Accumulator<16, decltype(keys)::value> s;
        k.wait();
        start_product<dtype, head_dim>(s, q, k.operand());
        wait_for(s);
        k.release();  // not as late as in `step`: `start` takes the maxima, so no scores can be lost
        scores.apply(s);
        mask.hide(s, rows.first(), last * block_n);
        softmax.start(s);
        if constexpr (q_stages > 1) on_begun();
        auto p_first = round_to_operand<dtype>(s);
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
    v.wait();
    start_sum<dtype, block_n>(o, p, v.operand());
    beside_last();
    wait_for(o, p);
    v.release();
}

// A consumer warpgroup: 64 rows of O of each work tile.
__device__ inline void attend(Shared &shared, const Params &params, const QkvoMaps &maps, Mask<causal, window> mask,
                              const Softcap<softcap> scores) {
    const int warp_row = uniform_warp_index() * 16;
    const int group_row = __shfl_sync(0xffffffff, warpgroup_index(), 0) * warpgroup_rows;
    K k(shared.k, shared.k_tiles[0]);
    V v(shared.v, shared.v_tiles[0]);
    WorkTileReader work{shared.work};
    auto q_at = shared.q.consumer();
    OptimisticSoftmax softmax{scores.scale};
    // O lies where its tile's Q was. So that place is free amid the next tile, when O is stored; if there is no other one,
    // the next tile's Q waits for that. Only lane 0, which stores it, has to wait. The first tile has none before it.
    auto q_before = q_at;
    q_before.stage = q_stages - 1;
    auto release_q_before = [&] {
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
        // What needs no O: the next work tile, sums, the log-sum-exp
        int row, head, batch;  // of this warp
        auto finalize = [&] {
            row = work.get(&WorkTile::row_q) + tile_row + warp_row;
            head = work.get(&WorkTile::head), batch = work.get(&WorkTile::batch_q);
            float *lse = work.lse() + tile_row + warp_row;
            work.advance();
            next_row = work.first_row();  // its wait ends a piece of code, so the rest stays behind the products' start
            __syncwarp();                 // all lanes have read the tile before
            softmax.finalize();
            softmax.store_lse_if(params.lse != nullptr, lse, end_row - tile_row - warp_row);
            work.release(softmax.is_finalized());  // so all this comes before the wait for O: ptxas would turn them round
        };
        // Blocks that only other warpgroups see
        auto skip = [&](int from, int to) {
#pragma unroll 1
            for (int j = from; j > to; --j) k.skip(), v.skip();
        };
        if constexpr (q_stages == 1) release_q_before();  // the producer loads Q before what is skipped
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
            // The rare path: scores that this warp has lost.
            auto recompute = [&] {
                const dtype *k_tile = shared.k_tiles[k.at.stage];
                scores_of_warp<KTile>(s, q, k_tile, shared.q_tiles[q_at.stage], warp_row);
            };
            attend_blocks(o, s, p, q, k, v, softmax, scores, mask, Rows{tile_row, warp_row, end_row}, last, lowest,
                          recompute, release_q_before, finalize);
            if constexpr (window) skip(lowest, lowest_of_tile);
        } else {
            if constexpr (q_stages > 1) release_q_before();
            finalize();
        }

        softmax.normalize(o);
        if (has_rows) start_store<OTile>(shared.q_tiles[q_at.stage], warp_row, o, maps.o, row, head, batch);
        q_at.advance();
    }
    wait_for_stores();  // shared memory lives as long as its CTA
}

extern "C" __global__ void __launch_bounds__(Share::num_threads, 1)
    attention_forward(const __grid_constant__ Params params, const __grid_constant__ Counters counters,
                      const __grid_constant__ QkvoMaps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);

    Mask<causal, window> mask(params);
    const Softcap<softcap> scores(params);
    if (threadIdx.x == 0) {
        shared.q.init(num_consumers * 4);
        shared.k.init(num_consumers * 4);
        shared.v.init(num_consumers * 4);
        shared.work.init(num_consumers * 4);
        fence_mbarrier_init();
    }
    __syncthreads();  // the barriers are made

    // Of the last warpgroup, warp 0 has the producer and warp 1 is the scheduler. The others end at once.
    if (warpgroup_index() == num_consumers) {
        release_registers<Share::producer>();
        if (uniform_warp_index() == num_consumers * 4 + 1) schedule(shared.work, counters.tiles_drawn, Order(params));
        if (threadIdx.x % warpgroup_threads == 0) load(shared, maps, mask);
        return;
    }
    take_registers<Share::consumer>();
    attend(shared, params, maps, mask, scores);
}
