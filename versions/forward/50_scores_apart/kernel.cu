// Attention for heads of up to 512 columns. The roles of a CTA, which takes one work tile of 64 rows after the other:
//
//     scheduler, a warp          draws a work tile, and puts into `work` where it is
//     producer, one thread       has TMA load Q of the work tile, and K and V block by block, the last keys first: into one ring
//     scorers, a warpgroup       have Q in registers: S = Q K^T, and by the softmax P, which goes to `weights`
//     summers, two warpgroups    O += P V, of 256 columns each; then O / l, which they store
//
//     scorers     S(j)   softmax(j)   S(j - 1)               softmax(j - 1)   S(j - 2)
//     summers                         O += P(j) V(j)                          O += P(j - 1) V(j - 1)
//
// The ring has Q, K(n), K(n - 1), V(n), K(n - 2), V(n - 1) ... K(0), V(1), V(0). Where K and V are one tensor, V of a block is its
// K: the ring has Q, K(n), K(n - 1) ... K(0). What the mbarriers say:
//
//     ring       full: TMA has brought the tile. empty: no scorer or summer needs it
//     weights    full: P and what O is multiplied by are there. empty: no summer needs them
//     work       wanted: the producer will soon need a work tile. full: it is there. empty: no scorer or summer needs it
#include "48_column_of_ones/column_of_ones.cuh"
#include "48_column_of_ones/lagging_softmax.cuh"
#include "49_every_width/rows_of_o.cuh"
#include "49_every_width/slope.cuh"
#include "50_scores_apart/partly_held_q.cuh"
#include "50_scores_apart/weight_tiles.cuh"
#include "config.cuh"
#include "launch.cuh"
#include "pipeline/pipeline.cuh"
#include "pipeline/roles.cuh"
#include "schedule/order.cuh"
#include "schedule/work_tile.cuh"
#include "softmax/mask.cuh"
#include "softmax/sinks.cuh"
#include "tile/warpgroup_gemm.cuh"

#include <type_traits>

using namespace config;

constexpr int summers = 2, scorers = 1;          // warpgroups, in this order; then comes the producer's
constexpr int group_cols = head_dim / summers;  // of O
constexpr int half_cols = group_cols / 2;       // of a product: ptxas takes no wider one where a launch has 128 registers
constexpr int of_scorer = 168;                   // registers: a summer's 160 are the fewest for 128 of O
using Share = Registers<summers, 1, 24, scorers, of_scorer>;
constexpr bool is_uneven = causal && !window;  // within a window all tiles see about as many keys
static_assert(block_m == warpgroup_rows && block_n == block_m, "Q comes through the ring of K and V");

using Tile = SwizzledPanels<block_n, head_dim>;  // of Q, K or V
using PTile = SwizzledPanels<block_m, block_n>;
using Ring = Pipeline<Tile, num_stages>;
using Weights = WeightRing<PTile, dtype, 2>;
using Q = PartlyHeldQ<Tile, dtype, 384>;
using K = OperandConsumer<Ring, ByRows<Tile>>;
using V = OperandConsumer<Ring, ByColumns<Tile>>;
using S = Accumulator<16, block_n>;
using HalfO = Accumulator<16, half_cols>;
using Softmax = LaggingSoftmax<dtype, lse>;
using Scores = SlopingScores<softcap, alibi>;

struct Shared {
    alignas(1024) dtype tiles[num_stages][Tile::size];
    alignas(1024) dtype q[Q::Rest::size];
    Weights weights;
    Ring ring;
    WorkTileQueue work;
};
FLASHLADDER_COUNTERS(tiles_drawn, "1");
struct Counters {
    unsigned *tiles_drawn;
};
using Tensors = std::conditional_t<packed, PackedParams, AttentionParams>;
using BoundedTensors = std::conditional_t<window || softcap, Bounded<Tensors>, Tensors>;
using BiasedTensors = std::conditional_t<alibi, Biased<BoundedTensors>, BoundedTensors>;
using SinkingTensors = std::conditional_t<sinks, Sinking<BiasedTensors>, BiasedTensors>;
using Params = Narrower<SinkingTensors>;
using Order = std::conditional_t<packed, PackedOrder<block_m, head_dim, is_uneven>, DenseOrder<block_m, head_dim, is_uneven>>;
constexpr Launch plain = Launch{Share::num_threads, sizeof(Shared), block_m, block_n}
                             .persistent()
                             .by_tma("q", block_m, 64, 128)
                             .by_tma("k", block_n, 64, 128)
                             .by_tma("v", block_n, 64, 128);
FLASHLADDER_KERNEL(attention_forward, Params, packed ? plain.over("total_q // block_m + batch + 1", "num_heads", "1") : plain);

// Rows of a work tile, and the blocks of keys that they see, from `last` down to `lowest`, if any.
struct Blocks {
    int first_row, end_row, last, lowest;

    __device__ Blocks(const WorkTileReader &work, Mask<causal, window> &mask)
        : first_row(work.get(&WorkTile::first_row)), end_row(work.get(&WorkTile::end_row)) {
        if constexpr (packed) mask.take(work.get(&WorkTile::seqlen_q), work.get(&WorkTile::seqlen_k));
        last = mask.template blocks<block_n>(end_row) - 1;
        lowest = mask.template first_block<block_n>(first_row);
    }
    __device__ bool any() const { return last >= lowest; }
};

// Whether V is K, or its first columns.
__device__ inline bool is_one_tensor(const Params &params) {
    const TensorStride &k = params.k_stride, &v = params.v_stride;
    return params.k == params.v && k.batch == v.batch && k.row == v.row && k.head == v.head;
}

// The producer, one thread.
__device__ inline void load(Shared &shared, const QkvMaps &maps, Mask<causal, window> mask, bool v_is_k) {
    auto at = shared.ring.producer();
#pragma unroll 1
    for (WorkTileReader work{shared.work};; work.advance()) {
        const WorkTile &tile = work.wait();
        if (tile.first_row == WorkTile::none) return;
        if constexpr (packed) mask.take(tile.seqlen_q, tile.seqlen_k);
        const int head_k = tile.head_k, row_k = tile.row_k, batch_k = tile.batch_k;
        const int last = mask.template blocks<block_n>(tile.end_row) - 1;
        const int lowest = mask.template first_block<block_n>(tile.first_row);
        if (last >= lowest) shared.ring.load(at, shared.tiles, maps.q, tile.row_q + tile.first_row, tile.head, tile.batch_q);
#pragma unroll 1
        for (int j = last; j >= lowest - 1; --j) {
            if (j >= lowest) shared.ring.load(at, shared.tiles, maps.k, row_k + j * block_n, head_k, batch_k);
            if (j < last && !v_is_k) shared.ring.load(at, shared.tiles, maps.v, row_k + (j + 1) * block_n, head_k, batch_k);
            // Not earlier: another CTA may be free for the next tile sooner.
            if (j == min(last, lowest + 2)) shared.work.request();
        }
    }
}

// A scorer warp: 16 rows of P of each work tile.
__device__ inline void score(Shared &shared, const Params &params, Mask<causal, window> mask, Scores scores, bool v_is_k) {
    const int warp_row = uniform_warp_index() % 4 * 16;
    K k(shared.ring, shared.tiles[0]);
    typename Weights::Producer weights(shared.weights, warp_row);
    Softmax softmax{scores.scale};
#pragma unroll 1
    for (WorkTileReader work{shared.work}; work.first_row() != WorkTile::none;) {
        const Blocks blocks(work, mask);
        const int row = blocks.first_row + warp_row;
        scores.take(params, work, mask);
        softmax.reset();
        if (blocks.any()) {
            Q q;
            S s;
            k.wait();
            q.start(shared.tiles[k.at.stage], shared.q, warp_row);
            k.release();
#pragma unroll 1
            for (int j = blocks.last; j >= blocks.lowest; --j) {
                k.wait();
                q.start_product(s, k.operand());  // S = Q K^T
                wait_for(s);
                scores.apply(s);
                scores.add_slope(s, row, j * block_n);
                mask.hide(s, row, j * block_n);
                if (softmax.has_new_rows()) softmax.begin_new_rows(s);
                // The rarest path: scores of lost rows once more, some columns at a time, as few registers are free.
                softmax.update(s, [&](const bool (&lost)[2]) {
                    const dtype *k_tile = shared.tiles[k.at.stage];
#pragma unroll
                    for (int col = 0; col < block_n; col += 16) {
                        Accumulator<16, 16> part;
                        scores_of_warp<Tile>(part, q, k_tile + Tile::step(col, 0), k_tile, warp_row);
                        scores.apply(part);
                        scores.add_slope(part, row, j * block_n + col);
                        mask.hide(part, row, j * block_n + col);
                        take_rows(s, col, part, lost);
                    }
                });  // P = 2^(S - m)
                k.release();
                const auto p = round_to_operand<dtype>(s);
                softmax.weigh(p);
                weights.pass(p, softmax.raised, softmax.factor);
                if (j < blocks.last && !v_is_k) k.skip();  // V of the block before
            }
            if (!v_is_k) k.skip();
        }
        Sink<sinks> sink;
        sink.take(params, work.get(&WorkTile::head));
        float *lse_to = work.lse() + row;
        work.advance();
        __syncwarp();  // all lanes have read the tile before
        work.release(true);
        if constexpr (lse) softmax.store_lse_if(params.lse != nullptr, lse_to, blocks.end_row - row, sink);
        float shares[2];
        each_row([&](int h) { shares[h] = share_of(softmax.row_w(h), softmax.m_from_zero(h), sink); });
        weights.pass(shares);
    }
}

// A summer warp: 16 rows of each work tile, and the columns of O of its warpgroup.
__device__ inline void sum(Shared &shared, const Params &params, Mask<causal, window> mask, bool v_is_k) {
    const int first_col = __shfl_sync(0xffffffff, warpgroup_index(), 0) * group_cols, warp_row = uniform_warp_index() % 4 * 16;
    V v(shared.ring, shared.tiles[0] + Tile::step(0, first_col));
    typename Weights::Consumer weights(shared.weights, warp_row);
#pragma unroll 1
    for (WorkTileReader work{shared.work}; work.first_row() != WorkTile::none;) {
        const Blocks blocks(work, mask);
        HalfO left, right;
        left.clear(), right.clear();
        if (blocks.any()) v.skip();             // Q
        if (blocks.any() && !v_is_k) v.skip();  // the first K
#pragma unroll 1
        for (int j = blocks.last; j >= blocks.lowest; --j) {
            if (j > blocks.lowest && !v_is_k) v.skip();  // K of the next block
            weights.wait();
            weights.scale(left), weights.scale(right);
            v.wait();
            start_product<dtype, block_n>(left, weights.p(), v.operand(), true);  // O += P V
            start_product<dtype, block_n>(right, weights.p(), v.operand().right(half_cols), true);
            wait_for<1>(left), wait_for(right);
            weights.release();
            v.release();
        }
        weights.wait();
        weights.scale(left), weights.scale(right);  // O / l
        weights.release();
        const int row = blocks.first_row + warp_row;
        const long long first = first_of_rows(params, work.get(&WorkTile::batch_q), work.get(&WorkTile::row_q) + row,
                                              work.get(&WorkTile::head)) +
                                first_col;
        work.advance();
        __syncwarp();  // all lanes have read the tile before
        work.release(true);
        dtype *to = static_cast<dtype *>(params.o) + first;
        const int rows = blocks.end_row - row, columns = params.head_dim_v - first_col;
        store_rows(to, params.o_stride.row, rows, columns, left);
        store_rows(to + half_cols, params.o_stride.row, rows, columns - half_cols, right);
    }
}

extern "C" __global__ void __launch_bounds__(Share::num_threads, 1)
    attention_forward(const __grid_constant__ Params params, const __grid_constant__ Counters counters,
                      const __grid_constant__ QkvMaps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);

    Mask<causal, window> mask(params);
    const bool v_is_k = is_one_tensor(params);
    constexpr int warps = (summers + scorers) * 4;  // that need tiles
    if (threadIdx.x == 0) {
        shared.ring.init(warps);
        shared.weights.init(scorers * 4, summers * 4);
        shared.work.init(warps);
        fence_mbarrier_init();
    }
    __syncthreads();  // the barriers are made

    if (warpgroup_index() == summers + scorers) {
        release_registers<Share::producer>();
        if (uniform_warp_index() == warps + 1) schedule(shared.work, counters.tiles_drawn, Order(params));
        if (threadIdx.x % warpgroup_threads == 0) load(shared, maps, mask, v_is_k);
    } else if (warpgroup_index() == summers) {
        take_registers<Share::helper>();
        score(shared, params, mask, Scores(params), v_is_k);
    } else {
        take_registers<Share::consumer>();
        sum(shared, params, mask, v_is_k);
    }
}
