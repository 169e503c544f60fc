// Any rows, as in rung 15, by Hopper's instructions: TMA brings keys, and warpgroups multiply.
//
//     producer       where the boxes of a block are, and a TMA copy a box and panel, as soon as a tile is empty
//     a consumer     64 packed rows: S = Q K^T of a block, beside O += P V of the one before, then its P
//     all of them    zeros in rows of V that no row of the CTA's tile sees, where a block is cut
#include "30_softmax_under_products/deferred.cuh"
#include "config.cuh"
#include "row_tiles.cuh"
#include "page_tiles.cuh"
#include "epilogue/store.cuh"
#include "pipeline/roles.cuh"
#include "tile/warpgroup_gemm.cuh"
#include "warp_copy.cuh"

using namespace config;

constexpr int rows = 16;  // of a warp
constexpr int num_consumers = block_m / warpgroup_rows, consumer_warps = block_m / rows;
using Share = Registers<num_consumers, ctas_per_sm>;

using QTile = SwizzledPanels<block_m, head_dim>;
using KVTile = SwizzledPanels<block_n, head_dim>;

struct Shared {
    alignas(1024) dtype q[QTile::size];
    PageTiles<KVTile, dtype, num_stages> k, v;
};
constexpr Launch tiles = Launch{Share::num_threads, sizeof(Shared), block_m, block_n}
                             .by_tma("k_cache", rows_of_box<block_n>(), 64, 128)
                             .by_tma("v_cache", rows_of_box<block_n>(), 64, 128);
FLASHLADDER_KERNEL(attention_decode, RowParams,
                   packed_q ? tiles.over("packed_rows // block_m + batch + 1", "num_heads_k", "1")
                            : tiles.over("cdiv(packed_rows, block_m)", "num_heads_k", "batch"));

// A row may see none of the first keys: m begins with the lowest finite number, which can be subtracted from itself.
struct RowSoftmax : DeferredSoftmax<rows> {
    __device__ explicit RowSoftmax(float unit_) {
        unit = unit_;
        clear();
        m[0][0] = m[0][1] = -3.0e38f;
    }
};

extern "C" __global__ void __launch_bounds__(Share::num_threads, ctas_per_sm)
    attention_decode(const __grid_constant__ RowParams params, const __grid_constant__ KvMaps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);

    const int number = gridDim.x - 1 - blockIdx.x, head_k = blockIdx.y;  // later rows see more keys: they start first
    const TilePlace at = place_of<block_m>(params, number);
    const RowTile<block_m> tile{params, at, head_k};
    if (!tile.has(0)) return;  // a number of no tile
    const SeenKeys seen{params, tile, at.keys};
    const int first_seen = seen.first(0), end = seen.end(tile.last());
    const int lowest = first_seen / block_n, last = (end + block_n - 1) / block_n - 1;  // blocks; from the last one down

    if (threadIdx.x == 0) {
        shared.k.init(consumer_warps);
        shared.v.init(consumer_warps);
        fence_mbarrier_init();
    }
    __syncthreads();  // the barriers are made

    if (warpgroup_index() == num_consumers) {
        release_registers<Share::producer>();
        if (threadIdx.x % warpgroup_threads >= 32) return;
        auto find = [&](int j) {  // the lane's box of a block
            const int key = j * block_n + lane_index() * shared.k.box_rows;
            return key + shared.k.box_rows <= first_seen ? KeyPlace{0, 0} : KeyPlace::find(params, tile.batch, key, end);
        };
        auto k_at = shared.k.producer(), v_at = shared.v.producer();
        KeyPlace place = find(last);
        if (last >= lowest) shared.k.load_boxes(k_at, maps.k, head_k, place);
#pragma unroll 1
        for (int j = last; j >= lowest; --j) {
            const KeyPlace next = j > lowest ? find(j - 1) : place;
            if (j > lowest) shared.k.load_boxes(k_at, maps.k, head_k, next);
            shared.v.load_boxes(v_at, maps.v, head_k, place);
            place = next;
        }
        return;
    }
    take_registers<Share::consumer>();

    const int warp = uniform_warp_index(), group = warp / 4, warp_row = warp * rows;
    const RowTile<rows> own{params, at, head_k, warp, consumer_warps};
    const RowTile<warpgroup_rows> of_group{params, at, head_k, group, num_consumers};
    const SeenKeys own_seen{params, own, at.keys};
    const SeenKeys group_seen{params, of_group, at.keys};
    const auto columns = columns_of<narrower>(params), columns_v = columns_of_v<narrower>(params);
    copy_part_by_warp<QTile, rows>(
        shared.q, warp_row, [&](int r) { return own.template element<const dtype>(params.q, params.q_stride, r); },
        [&](int r, int col) { return own.has(r) && columns.has(col); });
    cp_async_commit();
    cp_async_wait<0>();
    fence_proxy_async();                                  // before wgmma reads Q
    named_barrier_sync(2 + group, warpgroup_threads);  // Q is there for the group

    ByRows<QTile> q;
    ByRows<KVTile> k_tiles;
    ByColumns<KVTile> v_tiles;
    q.start(shared.q, warp_row);
    k_tiles.start(shared.k.tiles[0]);
    v_tiles.start(shared.v.tiles[0]);
    auto k_at = shared.k.consumer(), v_at = shared.v.consumer();

    Accumulator<rows, head_dim> o;
    o.clear();
    const Softcap<softcap> score{params};
    const LaneBias bias{own_seen, score.scale};
    const LaneSees sees{own_seen};
    RowSoftmax softmax{score.scale};

    // Waits for V of block j. P is 0 of keys that nobody sees, and 0 * V must be 0.
    auto wait_for_v = [&](int j) {
        shared.v.wait(v_at);
        const int first = j * block_n;
        if (first >= first_seen && first + block_n <= end) return;
        for (int r = warp * 4 + lane_index() / 8; r < block_n; r += consumer_warps * 4)
            if (first + r < first_seen || first + r >= end)
#pragma unroll
                for (int panel = 0; panel < KVTile::cols; panel += 64)
                    *reinterpret_cast<uint4 *>(shared.v.tiles[v_at.stage] +
                                               KVTile::offset(r, panel + lane_index() % 8 * 8)) = {};
        fence_proxy_async();                            // before wgmma reads V
        named_barrier_sync(1, consumer_warps * 32);  // every consumer has written its zeros
    };
    // Blocks of which no row of the group sees a key
    auto skip = [&](int from, int to) {
#pragma unroll 1
        for (int j = from; j > to; --j) {
            shared.k.wait(k_at);
            shared.k.release(k_at);
            wait_for_v(j);
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
    if (group_last >= lowest) {
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
            wait_for_v(j + 1);
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
        wait_for_v(group_lowest);
        start_sum<dtype, block_n>(o, p, v_tiles.after(v_at.stage));
        wait_for(o, p);
        if constexpr (window) {
            shared.v.release(v_at);
            skip(group_lowest - 1, lowest - 1);
        }
    }
    if (!of_group.has(0)) return;

    finish_rows(params, own, softmax, o);
    named_barrier_sync(2 + group, warpgroup_threads);  // its warps have read their Q, whose place O takes
    store_to_shared_hoisted<QTile>(shared.q, warp_row, o);
    __syncwarp();
    store_part_by_warp<QTile, rows>(
        shared.q, warp_row, [&](int r) { return own.template element<dtype>(params.o, params.o_stride, r); },
        [&](int r, int col) { return own.has(r) && columns_v.has(col); });
}
