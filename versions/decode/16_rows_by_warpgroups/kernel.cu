// Any rows, as in rung 15, by Hopper's instructions: TMA brings keys, and warpgroups multiply. There are as many CTAs as the
// GPU holds, each of which computes tile after tile.
//
//     copy_keys      a warp for K, and one for V: where the boxes of a block are, and a TMA copy a box and panel
//     copy_rows      a warp: the tile that comes next, and its rows of Q
//     a consumer     64 packed rows: S = Q K^T of a block, beside O += P V of the one before, then its P
//     all of them    zeros in rows of V that are no keys
//
//     q.known        what is to be done next is there
//     q.full         Q is there                         q.empty    every consuming warp has stored its O
//     k, v           a ring of blocks each, as in PageTiles
#include "30_softmax_under_products/deferred.cuh"
#include "config.cuh"
#include "row_parts.cuh"
#include "page_tiles.cuh"
#include "epilogue/store.cuh"
#include "pipeline/roles.cuh"
#include "tile/warpgroup_gemm.cuh"
#include "warp_copy.cuh"

using namespace config;

constexpr int rows = 16;  // of a warp
constexpr int num_consumers = block_m / warpgroup_rows, consumer_warps = block_m / rows;
using Share = Registers<num_consumers, ctas_per_sm, 56>;

using QTile = SwizzledPanels<block_m, head_dim>;
using KVTile = SwizzledPanels<block_n, head_dim>;
using Part = PartOfTile<block_m, head_dim>;

// Tiles of Q, each with the work on it, which is known before Q has come. Two warps that copy keys read it, and consumers.
struct RowPipeline : TilePipeline<QTile, dtype, q_stages> {
    Mbarrier known[q_stages];
    RowWork work[q_stages];
    int head_k[q_stages];

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
    PageTiles<KVTile, dtype, num_stages> k, v;
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
                       .by_tma("v_cache", rows_of_box<block_n>(), 64, 128)
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

// A row may see none of the first keys: m begins with the lowest finite number, which can be subtracted from itself.
struct RowSoftmax : DeferredSoftmax<rows> {
    __device__ explicit RowSoftmax(float unit_) {
        unit = unit_;
        clear();
        m[0][0] = m[0][1] = -3.0e38f;
    }
};

// The consumer's place in the rings.
struct Consumer {
    const RowParams &params;
    Shared &shared;
    int warp, group, warp_row;
    PipelineState<num_stages> k_at, v_at;
    ByRows<KVTile> k_tiles;
    ByColumns<KVTile> v_tiles;

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
                for (int panel = 0; panel < KVTile::cols; panel += 64)
                    *reinterpret_cast<uint4 *>(shared.v.tiles[v_at.stage] + KVTile::offset(r, panel + lane_index() % 8 * 8)) = {};
        fence_proxy_async();  // before wgmma reads V
        meet();               // every consumer has written its zeros
    }

    // O of a tile, not divided yet.
    __device__ void attend(const RowWork &work, int head_k, const dtype *tile_q, RowSoftmax &softmax, Accumulator<rows, head_dim> &o) {
        const RowTile<rows> own{params, work.at, head_k, warp, consumer_warps};
        const RowTile<warpgroup_rows> of_group{params, work.at, head_k, group, num_consumers};
        const SeenKeys own_seen{params, own, work.at.keys};
        const SeenKeys group_seen{params, of_group, work.at.keys};
        const SeenBlocks blocks{params, work, head_k};
        const int keys = work.at.keys, first_seen = blocks.first_seen, lowest = blocks.lowest, last = blocks.last;
        const Softcap<softcap> score{params};
        const LaneBias bias{own_seen, softmax.unit};
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
        auto bound = [&](Accumulator<rows, block_n> &s, int j) {
            score.apply(s);
            bias.add(s, j * block_n);
            sees.hide(s, j * block_n);
        };
        const int group_end = of_group.has(0) ? group_seen.end(of_group.last()) : 0;
        const int group_lowest = max(lowest, group_seen.first(0) / block_n);
        int group_last = min(last, (group_end + block_n - 1) / block_n - 1);
        if (group_last < group_lowest) group_last = lowest - 1;
        skip(last, group_last);
        if (group_last < lowest) return;

        Accumulator<rows, block_n> s;
        shared.k.wait(k_at);
        start_product<dtype, head_dim>(s, q, k_tiles.after(k_at.stage));
        wait_for(s);
        shared.k.release(k_at);
        bound(s, group_last);
        softmax.update(s);
        auto p = round_to_operand<dtype>(s);
#pragma unroll 1
        for (int j = group_last - 1; j >= group_lowest; --j) {
            // S = Q K^T of this block, then O += P V of the one before
            shared.k.wait(k_at);
            start_product<dtype, head_dim>(s, q, k_tiles.after(k_at.stage));
            wait_for_v(j + 1, first_seen, keys);
            start_sum<dtype, block_n>(o, p, v_tiles.after(v_at.stage));

            // P = 2^(unit * S - m); O follows the new m as soon as it is at hand
            wait_for<1>(s);
            shared.k.release(k_at);
            bound(s, j);
            softmax.update(s);
            wait_for(o, p);
            shared.v.release(v_at);
            softmax.rescale(o);
            p = round_to_operand<dtype>(s);
        }
        wait_for_v(group_lowest, first_seen, keys);
        start_sum<dtype, block_n>(o, p, v_tiles.after(v_at.stage));
        wait_for(o, p);
        shared.v.release(v_at);
        if constexpr (window) skip(group_lowest - 1, lowest - 1);
    }

    // A tile's O and log-sum-exps to memory, whose keys are all in it.
    __device__ void store(const RowWork &work, int head_k, dtype *tile_q, const RowSoftmax &softmax, Accumulator<rows, head_dim> &o) const {
        const auto columns_v = columns_of_v<narrower>(params);
        const RowTile<rows> own{params, work.at, head_k, warp, consumer_warps};
        finish_rows(params, own, softmax, o);
        meet_group();  // its warps have read their Q, whose place O takes
        store_to_shared_hoisted<QTile>(tile_q, warp_row, o);
        __syncwarp();
        store_part_by_warp<QTile, rows>(
            tile_q, warp_row, [&](int r) { return own.template element<dtype>(params.o, params.o_stride, r); },
            [&](int r, int col) { return own.has(r) && columns_v.has(col); });
    }

    // Those of a part of its keys; and of all, by the CTA that comes last.
    __device__ void store_part(const RowParts &parts, const RowWork &work, int head_k, const RowSoftmax &softmax,
                               Accumulator<rows, head_dim> &o) const {
        const auto columns_v = columns_of_v<narrower>(params);
        const RowTile<block_m> tile{params, work.at, head_k};
        const Part part{params, work, head_k};
        if (tile.has(warp_row))
            part.put(parts, work.part, warp_row, softmax, o, [&](int h, float *row) { put_two_columns(o, h, row); });
        if (is_last_of(work.parts, parts.arrived + part.first / block_m, [] { meet(); }))
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
    __syncthreads();  // the barriers are made

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
    const float unit = Softcap<softcap>{params}.scale;
#pragma unroll 1
    while (true) {
        shared.q.wait(q_at);
        const RowWork work = shared.q.work[q_at.stage];
        if (work.at.rows == 0) return;
        const int head_k = shared.q.head_k[q_at.stage];
        Accumulator<rows, head_dim> o;
        o.clear();
        RowSoftmax softmax{unit};
        consumer.attend(work, head_k, shared.q.tiles[q_at.stage], softmax, o);
        if (work.parts > 1)
            consumer.store_part(workspaces, work, head_k, softmax, o);
        else
            consumer.store(work, head_k, shared.q.tiles[q_at.stage], softmax, o);
        __syncwarp();  // its lanes have read what was in Q's place, and the work
        shared.q.release(q_at);
    }
}
