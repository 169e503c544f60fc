// Rows by warpgroups, as in rung 16, with a softmax whose maxima lag behind. P is summed by a column of ones beside V, and
// only blocks that some row does not see whole are masked.
//
//     copy_keys      a warp for K, and one for V: where the boxes of a block are, and a TMA copy a box and panel
//     copy_rows      a warp: the tile that comes next, and its rows of Q
//     a consumer     64 packed rows: S = Q K^T of a block, beside O += P V of the one before, then its P. K is released behind
//                    P: scores that P has lost are computed once more
//     all of them    zeros in rows of V that are no keys
//
//     q.known        what is to be done next is there
//     q.full         Q is there                         q.empty    every consuming warp has stored its O
//     k, v           a ring of blocks each, as in PageTiles
#include "48_column_of_ones/column_of_ones.cuh"
#include "48_column_of_ones/lagging_softmax.cuh"
#include "config.cuh"
#include "page_tiles.cuh"
#include "row_parts.cuh"
#include "epilogue/store.cuh"
#include "pipeline/roles.cuh"
#include "tile/warpgroup_gemm.cuh"
#include "warp_copy.cuh"

#include <type_traits>

using namespace config;

constexpr int rows = 16;  // of a warp
constexpr int num_consumers = block_m / warpgroup_rows, consumer_warps = block_m / rows;
using Share = Registers<num_consumers, ctas_per_sm, 56>;

using QTile = SwizzledPanels<block_m, head_dim>;
using KTile = SwizzledPanels<block_n, head_dim>;
constexpr int v_panel = head_dim % 64 ? 32 : 64;  // columns: V fills its panels, as ones begin behind them
using VTile = WithOnes<SwizzledPanels<block_n, head_dim, v_panel>>;
using S = Accumulator<16, block_n>;
using P = HeldA<16, block_n>;
using O = Accumulator<16, head_dim + ones_columns>;  // and the sum of P
using Softmax = LaggingSoftmax<dtype, true>;
constexpr bool ends_early = causal || window;  // a row may see no later key
using Part = PartOfTile<block_m, head_dim>;

// Tiles of Q, each with the work on it, which is known before Q has come. Two warps that copy keys read it, and consumers.
struct RowPipeline : TilePipeline<QTile, dtype, q_stages> {
    Mbarrier known[q_stages];
    RowWork work[q_stages];
    int head_k[q_stages];
    bool is_last;  // of the CTAs that have parts of a tile

    __device__ void init() {
        TilePipeline<QTile, dtype, q_stages>::init(consumer_warps + 2);
        for (Mbarrier &barrier : known) barrier.init(1);
    }
    // All work of this CTA, in turn, for a warp that needs no Q: visit(work, head_k).
    template <class Visit>
    __device__ void each_work(Visit visit) {
        auto at = this->consumer();
#pragma unroll 1
        while (true) {
            known[at.stage].wait(at.parity);
            const RowWork its_work = work[at.stage];
            const int its_head_k = head_k[at.stage];
            __syncwarp();  // every lane has read it
            this->release(at);
            if (its_work.at.rows == 0) return;
            visit(its_work, its_head_k);
        }
    }
};
struct Shared {
    RowPipeline q;
    PageTiles<KTile, dtype, num_stages> k;
    PageTiles<VTile, dtype, num_stages> v;
};
// Which work is the next one, for all CTAs.
FLASHLADDER_COUNTERS(next_work, "1");
struct Workspaces : RowParts {
    unsigned *next;
};
FLASHLADDER_KERNEL(attention_decode, RowParams,
                   Launch{Share::num_threads, sizeof(Shared), block_m, block_n}
                       .persistent(ctas_per_sm)
                       .by_tma("k_cache", rows_of_box<block_n>(), 64, 128)
                       .by_tma("v_cache", rows_of_box<block_n>(), v_panel, v_panel * 2)
                       .over(FLASHLADDER_ROW_TILES));

// The keys that a tile sees: blocks from the last one down, and the first key.
struct SeenBlocks {
    int first_seen, lowest, last;

    __device__ SeenBlocks(const RowParams &params, const RowWork &work, int head_k) {
        const RowTile<block_m> tile{params, work.at, head_k};
        const SeenKeys seen{params, tile, work.at.keys};
        first_seen = seen.first(0);
        const int first = first_seen / block_n, end = (seen.end(tile.last()) + block_n - 1) / block_n;
        lowest = work.first_block(first, end), last = work.first_block(first, end, 1) - 1;
    }
};

// Of K or of V.
template <class Tiles>
__device__ inline void copy_keys(const RowParams &params, const TensorMapBytes &map, Tiles &tiles, RowPipeline &q) {
    auto at = tiles.producer();
    q.each_work([&](const RowWork &work, int head_k) {
        const SeenBlocks blocks{params, work, head_k};
        auto find = [&](int j) {  // the lane's box of a block
            const int key = j * block_n + lane_index() * tiles.box_rows;
            return j < blocks.lowest || key + tiles.box_rows <= blocks.first_seen
                       ? KeyPlace{0, 0}
                       : KeyPlace::find(params, work.at.sequence, key, work.at.keys);
        };
        KeyPlace place = find(blocks.last);
#pragma unroll 1
        for (int j = blocks.last; j >= blocks.lowest; --j) {
            const KeyPlace next = find(j - 1);
            tiles.load_boxes(at, map, head_k, place);
            place = next;
        }
    });
}

// Starts copying a tile's rows, by a warp. Behind them come zeros for the rest of their warpgroup, all warps of which multiply.
__device__ inline void copy_q(const RowParams &params, const RowTile<block_m> &tile, dtype *to) {
    const auto columns = columns_of<narrower>(params);
    int first = 0;
#pragma unroll 1
    for (; first <= tile.last(); first += rows)
        copy_part_by_warp<QTile, rows>(
            to, first, [&](int r) { return tile.template element<const dtype>(params.q, params.q_stride, first + r); },
            [&](int r, int col) { return tile.has(first + r) && columns.has(col); });
    clear_rows_by_warp<QTile>(to, first, (first + warpgroup_rows - 1) / warpgroup_rows * warpgroup_rows);
}

// Takes the next work as soon as there is a place for its Q. The first one has the CTA's own number. For others it asks, once
// more than there is work for it: so many times in all as there is work, so that the counter is then at zero again.
__device__ inline void copy_rows(const RowParams &params, unsigned *next, RowPipeline &q) {
    auto at = q.producer();
    const RowSchedule<block_m, block_n, RowParams> schedule{params, wave};
    const unsigned all = static_cast<unsigned>(schedule.all) * params.num_heads_k;
    unsigned i = blockIdx.x;
#pragma unroll 1
    while (true) {
        const RowWork work = i < all ? schedule.find(i / params.num_heads_k) : RowWork{};
        if (i >= all || work.at.rows > 0) {  // else of sequences that overlap
            const int head_k = i % params.num_heads_k;
            if (lane_index() == 0) {
                q.work[at.stage] = work, q.head_k[at.stage] = head_k;
                q.known[at.stage].arrive();
            }
            if (i < all) copy_q(params, RowTile<block_m>{params, work.at, head_k}, q.tiles[at.stage]);
            cp_async_commit();
            cp_async_wait<0>();
            fence_proxy_async();  // before wgmma reads Q
            __syncwarp();
            q.full[at.stage].arrive_as_warp();
            if (i >= all) return;
            at.advance();
            q.empty[at.stage].wait(at.parity);
        }
        i = __shfl_sync(0xffffffff, lane_index() == 0 ? gridDim.x + atomicInc(next, all - 1) : 0, 0);
    }
}

// What a tile's rows come to, O not divided yet.
struct Sums {
    float m[1][2], l[1][2];  // of l the lane's share
    Accumulator<16, head_dim> o;

    // O is of P as it was rounded, and so is the sum beside it; l, which the log-sum-exp needs, is of P before that. So that
    // O / l is the quotient of what was rounded alike, O takes the ratio of the two.
    __device__ Sums(const Softmax &softmax, const O &wide) {
        each_row([&](int h) {
            m[0][h] = softmax.m_from_zero(h), l[0][h] = softmax.l[h];
            const float sum = quad_sum(l[0][h]);  // by all lanes, though some of a warp's rows may see no key
            const float rounded = wide.block[0][head_dim / 8][2 * h], ratio = rounded > 0.0f ? sum / rounded : 0.0f;
#pragma unroll
            for (int n = 0; n < head_dim / 8; ++n)
#pragma unroll
                for (int i = 2 * h; i < 2 * h + 2; ++i) o.block[0][n][i] = wide.block[0][n][i] * ratio;
        });
    }
};

// The consumer's place in the rings.
struct Consumer {
    const RowParams &params;
    Shared &shared;
    int warp, group, warp_row;
    PipelineState<num_stages> k_at, v_at;
    ByRows<KTile> k_tiles;
    ByColumns<VTile> v_tiles;

    __device__ Consumer(const RowParams &params_, Shared &shared_)
        : params(params_), shared(shared_), warp(uniform_warp_index()), group(warp / 4), warp_row(warp * rows),
          k_at(shared.k.consumer()), v_at(shared.v.consumer()) {
        k_tiles.start(shared.k.tiles[0]);
        v_tiles.start(shared.v.tiles[0]);
    }

    __device__ static void meet() { named_barrier_sync(1, consumer_warps * 32); }
    __device__ void meet_group() const { named_barrier_sync(2 + group, warpgroup_threads); }

    // Waits for V of block j. P is 0 of keys that nobody sees, and 0 * V must be 0.
    __device__ void wait_for_v(int j, int first_seen, int keys) {
        shared.v.wait(v_at);
        const int first = j * block_n;
        if (first >= first_seen && first + block_n <= keys) return;
        for (int r = warp * 4 + lane_index() / 8; r < block_n; r += consumer_warps * 4)
            if (first + r < first_seen || first + r >= keys)
#pragma unroll
                for (int first_col = 0; first_col < VTile::cols; first_col += 64)
                    if (const int col = first_col + lane_index() % 8 * 8; col < VTile::cols)
                        *reinterpret_cast<uint4 *>(shared.v.tiles[v_at.stage] + VTile::offset(r, col)) = {};
        fence_proxy_async();  // before wgmma reads V
        meet();               // every consumer has written its zeros
    }

    // O of a tile, not divided yet. Inlined: products that cross a call run one by one.
    __device__ __forceinline__ void attend(const RowWork &work, const int &head_k, const dtype *tile_q, Softmax &softmax, O &o) {
        const RowTile<rows> own{params, work.at, head_k, warp, consumer_warps};
        const RowTile<warpgroup_rows> of_group{params, work.at, head_k, group, num_consumers};
        const SeenKeys own_seen{params, own, work.at.keys};
        const SeenKeys group_seen{params, of_group, work.at.keys};
        const SeenBlocks blocks{params, work, head_k};
        const int keys = work.at.keys, first_seen = blocks.first_seen, lowest = blocks.lowest, last = blocks.last;
        const Softcap<softcap> score{params};
        const LaneBias bias{own_seen, softmax.scale};
        const LaneSees sees{own_seen};
        ByRows<QTile> q;
        q.start(tile_q, warp_row);

        // Blocks of which no row of the group sees a key
        auto skip = [&](int from, int to) {
#pragma unroll 1
            for (int j = from; j > to; --j) {
                shared.k.wait(k_at);
                shared.k.release(k_at);
                wait_for_v(j, first_seen, keys);
                shared.v.release(v_at);
            }
        };
        const int group_end = of_group.has(0) ? group_seen.end(of_group.last()) : 0;
        const int group_lowest = max(lowest, group_seen.first(0) / block_n);
        int group_last = min(last, (group_end + block_n - 1) / block_n - 1);
        if (group_last < group_lowest) group_last = lowest - 1;
        skip(last, group_last);
        if (group_last < lowest) return;

        auto start_scores = [&](S &s) {
            shared.k.wait(k_at);
            start_product<dtype, head_dim>(s, q, k_tiles.after(k_at.stage));
        };
        auto bound = [&](auto &s, int key, auto is_masked) {
            score.apply(s);
            bias.add(s, key);
            if constexpr (decltype(is_masked)::value) sees.hide(s, key);
        };
        S s;
        P p;
        // S = Q K^T of block j, then O += P V of the one before
        auto step = [&](int j, auto is_masked) {
            constexpr bool masked = decltype(is_masked)::value;
            start_scores(s);
            if constexpr (ends_early && !masked)
                shared.v.wait(v_at);  // two blocks from an end: nothing is to be cleared
            else
                wait_for_v(j + 1, first_seen, keys);
            start_sum<dtype, block_n>(o, p, v_tiles.after(v_at.stage));

            wait_for<1>(s);
            bound(s, j * block_n, is_masked);
            if (masked && softmax.has_new_rows()) softmax.begin_new_rows(s);
            // The rarest path: scores of lost rows once more, some columns at a time, as few registers are free.
            softmax.update(s, [&](const bool (&lost)[2]) {
#pragma unroll
                for (int col = 0; col < block_n; col += 16) {
                    Accumulator<16, 16> part;
                    const dtype *some_k = shared.k.tiles[k_at.stage] + KTile::step(col, 0);
                    scores_of_warp<KTile>(part, q, some_k, tile_q, warp_row);
                    bound(part, j * block_n + col, is_masked);
                    take_rows(s, col, part, lost);
                }
            });
            shared.k.release(k_at, softmax.is_computed());  // so P comes before the wait for O: ptxas would turn them round
            wait_for(o, p);
            shared.v.release(v_at);
            softmax.rescale(o);
            p = round_to_operand<dtype>(s);
        };
        start_scores(s);
        wait_for(s);
        shared.k.release(k_at);  // `start` takes the maxima, so no scores can be lost
        bound(s, group_last * block_n, std::true_type());
        softmax.start(s);
        p = round_to_operand<dtype>(s);
        // The last of a group's rows sees 63 keys more than the first, and a block has 64 at least. So each row has begun behind
        // the second block; all rows see those below whole, as far as no window begins.
        const int lowest_plain = max(group_lowest, (group_seen.first(of_group.last()) + block_n - 1) / block_n);
        int j = group_last - 1;
        if (ends_early && j >= group_lowest) step(j--, std::true_type());
#pragma unroll 1
        for (; j >= lowest_plain; --j) step(j, std::false_type());
        if constexpr (window)
#pragma unroll 1
            for (; j >= group_lowest; --j) step(j, std::true_type());
        wait_for_v(group_lowest, first_seen, keys);
        start_sum<dtype, block_n>(o, p, v_tiles.after(v_at.stage));
        wait_for(o, p);
        shared.v.release(v_at);
        if constexpr (window) skip(group_lowest - 1, lowest - 1);
    }

    // A tile's O and log-sum-exps to memory, whose keys are all in it.
    __device__ void store(const RowWork &work, int head_k, dtype *tile_q, Sums &sums) const {
        const auto columns_v = columns_of_v<narrower>(params);
        const RowTile<rows> own{params, work.at, head_k, warp, consumer_warps};
        finish_rows(params, own, sums, sums.o);
        meet_group();  // its warps have read their Q, whose place O takes
        store_to_shared_hoisted<QTile>(tile_q, warp_row, sums.o);
        __syncwarp();
        store_part_by_warp<QTile, rows>(
            tile_q, warp_row, [&](int r) { return own.template element<dtype>(params.o, params.o_stride, r); },
            [&](int r, int col) { return own.has(r) && columns_v.has(col); });
    }

    // Those of a part of its keys; and of all, by the CTA that comes last.
    __device__ void store_part(const RowParts &parts, const RowWork &work, int head_k, Sums &sums) const {
        const auto columns_v = columns_of_v<narrower>(params);
        const RowTile<block_m> tile{params, work.at, head_k};
        const Part part{params, work, head_k};
        if (tile.has(warp_row))
            part.put(parts, work.part, warp_row, sums, sums.o, [&](int h, float *row) { put_two_columns(sums.o, h, row); });
        if (is_last_of(work.parts, parts.arrived + part.first / block_m, shared.q.is_last, [] { meet(); }))
            part.combine(params, parts, work.parts, tile, consumer_warps * 32, [&](int col) { return columns_v.has(col); });
    }
};

extern "C" __global__ void __launch_bounds__(Share::num_threads, ctas_per_sm)
    attention_decode(const __grid_constant__ RowParams params, const __grid_constant__ Workspaces workspaces,
                     const __grid_constant__ KvMaps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);

    if (threadIdx.x == 0) {
        shared.q.init();
        shared.k.init(consumer_warps);
        shared.v.init(consumer_warps);
        fence_mbarrier_init();
    }
    write_ones<VTile>(shared.v.tiles);
    __syncthreads();  // the barriers and the ones are made

    if (warpgroup_index() == num_consumers) {
        release_registers<Share::producer>();
        const int role = uniform_warp_index() % 4;
        if (role == 0) copy_keys(params, maps.k, shared.k, shared.q);
        if (role == 1) copy_keys(params, maps.v, shared.v, shared.q);
        if (role == 2) copy_rows(params, workspaces.next, shared.q);
        return;
    }
    take_registers<Share::consumer>();

    Consumer consumer{params, shared};
    auto q_at = shared.q.consumer();
    Softmax softmax{Softcap<softcap>{params}.scale};
#pragma unroll 1
    while (true) {
        shared.q.wait(q_at);
        const RowWork &work = shared.q.work[q_at.stage];  // read again behind the loop, which has no registers for it
        if (work.at.rows == 0) return;
        const int &head_k = shared.q.head_k[q_at.stage];
        O o;
        o.clear();
        softmax.reset();
        consumer.attend(work, head_k, shared.q.tiles[q_at.stage], softmax, o);
        Sums sums{softmax, o};
        if (work.parts > 1)
            consumer.store_part(workspaces, work, head_k, sums);
        else
            consumer.store(work, head_k, shared.q.tiles[q_at.stage], sums);
        __syncwarp();  // its lanes have read what was in Q's place, and the work
        shared.q.release(q_at);
    }
}
