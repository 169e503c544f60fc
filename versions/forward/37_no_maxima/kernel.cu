// Rung 35, but the scores of a block are taken before anyone knows their maximum.
#include "31_persistent/tma_store.cuh"
#include "34_any_attention/tile_queue.cuh"
#include "37_no_maxima/stale_max_softmax.cuh"
#include "config.cuh"
#include "launch.cuh"
#include "pipeline/roles.cuh"
#include "pipeline/tile_pipeline.cuh"
#include "softmax/mask.cuh"
#include "tile/warpgroup_gemm.cuh"

#include <type_traits>

using namespace config;

constexpr int num_consumers = block_m / warpgroup_rows;  // warpgroups; then comes the producer's
using Share = Registers<num_consumers, 1>;

using QTile = SwizzledPanels<block_m, head_dim>;
using KVTile = SwizzledPanels<block_n, head_dim>;
using HeldQ = QOperand<16, head_dim, 0, HoistedReader<QTile, dtype>>;

struct Shared {
    alignas(1024) dtype o[QTile::size];
    TilePipeline<QTile, dtype, 1> q;
    TilePipeline<KVTile, dtype, num_stages> k, v;
    TileQueue queue;
};
FLASHLADDER_COUNTERS(tiles_drawn, "1");
struct Counters {
    unsigned *tiles_drawn;
};
FLASHLADDER_KERNEL(attention_forward, AttentionParams,
                   Launch{Share::num_threads, sizeof(Shared), block_m, block_n}
                       .persistent()
                       .by_tma("q", block_m, 64, 128)
                       .by_tma("k", block_n, 64, 128)
                       .by_tma("v", block_n, 64, 128)
                       .by_tma("o", 16, 64, 128));

extern "C" __global__ void __launch_bounds__(Share::num_threads, 1)
    attention_forward(const __grid_constant__ AttentionParams params, const __grid_constant__ Counters counters,
                      const __grid_constant__ QkvoMaps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);

    const TileOrder<block_m, head_dim, causal> order(params);
    const Mask<causal> mask(params);
    if (threadIdx.x == 0) {
        shared.q.init(num_consumers * 4);
        shared.k.init(num_consumers * 4);
        shared.v.init(num_consumers * 4);
        shared.queue.init(num_consumers * 4);
        fence_mbarrier_init();
    }
    __syncthreads();  // the barriers are made

    if (warpgroup_index() == num_consumers) {
        release_registers<Share::producer>();
        if (threadIdx.x % warpgroup_threads != 0) return;
        auto q_at = shared.q.producer();
        auto k_at = shared.k.producer(), v_at = shared.v.producer();
        TileDrawer drawer{shared.queue, counters.tiles_drawn, order.count};
        for (int number = drawer.draw(); number != TileQueue::none; number = drawer.draw()) {
            const auto tile = order.tile(number);
            const int last = mask.template blocks<block_n>(min(tile.first_row + block_m, params.seqlen_q)) - 1;
            if (last < 0) continue;
            shared.q.load(q_at, maps.q, tile.first_row, tile.head, tile.batch);
            shared.k.load(k_at, maps.k, last * block_n, tile.head_k, tile.batch);
            for (int j = last; j >= 0; --j) {
                if (j > 0) shared.k.load(k_at, maps.k, (j - 1) * block_n, tile.head_k, tile.batch);
                shared.v.load(v_at, maps.v, j * block_n, tile.head_k, tile.batch);
            }
        }
        return;
    }
    take_registers<Share::consumer>();

    const int warp_row = warp_index() * 16;
    const int group_row = __shfl_sync(0xffffffff, warpgroup_index(), 0) * warpgroup_rows;
    ByRows<KVTile> k_tiles;
    ByColumns<KVTile> v_tiles;
    k_tiles.start(shared.k.tiles[0]);
    v_tiles.start(shared.v.tiles[0]);
    auto q_at = shared.q.consumer();
    auto k_at = shared.k.consumer(), v_at = shared.v.consumer();
    StaleMaxSoftmax<16> softmax{params.softmax_scale * log2_e};

    // Releases a tile that only other warpgroups read. It must have come: a phase later, this one would pass for the next.
    auto skip = [](auto &ring, auto &at) {
        ring.wait(at);
        ring.release(at);
    };
    TileReader reader{shared.queue};
    for (int number = reader.next(); number != TileQueue::none; number = reader.next()) {
        const auto tile = order.tile(number);
        const int row = tile.first_row + warp_row;  // of this warp
        const int of_tile = mask.template blocks<block_n>(min(tile.first_row + block_m, params.seqlen_q)) - 1;
        const int first_row = tile.first_row + group_row, end_row = min(first_row + warpgroup_rows, params.seqlen_q);
        const int last = first_row < end_row ? mask.template blocks<block_n>(end_row) - 1 : -1;
#pragma unroll 1
        for (int j = of_tile; j > last; --j) skip(shared.k, k_at), skip(shared.v, v_at);
        if (last < 0 && of_tile >= 0) skip(shared.q, q_at);

        Accumulator<16, head_dim> o;  // of this warp
        o.clear();

        softmax.clear();
        if (last >= 0) {
            // S = Q K^T and P = 2^(unit * S - m) of the first block
            Accumulator<16, block_n> s;
            std::conditional_t<q_in_registers, HeldQ, ByRows<QTile>> q;
            shared.q.wait(q_at);
            q.start(shared.q.tiles[0], warp_row);
            shared.k.wait(k_at);
            start_product<dtype, head_dim>(s, q, k_tiles.after(k_at.stage));
            wait_for(s);
            if constexpr (q_in_registers) shared.q.release(q_at);  // a load may come late, but a product has used what it brought
            shared.k.release(k_at);
            mask.hide(s, row, last * block_n);
            softmax.start(s);
            auto p = round_to_operand<dtype>(s);
            // S = Q K^T of block j, then O += P V of the one before
            auto step = [&](int j, auto is_masked) {
                constexpr bool masked = decltype(is_masked)::value;
                shared.k.wait(k_at);
                start_product<dtype, head_dim>(s, q, k_tiles.after(k_at.stage));
                shared.v.wait(v_at);
                start_sum<dtype, block_n>(o, p, v_tiles.after(v_at.stage));

                // P = 2^(unit * S - m); O follows the new m as soon as it is at hand
                wait_for<1>(s);
                auto hide = [&] {
                    if constexpr (masked) mask.hide(s, row, j * block_n);
                };
                hide();
                auto recompute = [&] {
                    scores_of_warp<KVTile>(s, q, shared.k.tiles[k_at.stage], shared.q.tiles[0], warp_row);
                };
                softmax.update(s, [&] { recompute(), hide(); }, masked && softmax.has_new_rows());
                shared.k.release(k_at, softmax.is_summed());  // so P comes before the wait for O: ptxas would turn them round
                wait_for(o, p);
                shared.v.release(v_at);
                softmax.rescale(o);
                p = round_to_operand<dtype>(s);
            };
            // The last of a warpgroup's rows sees 63 keys more than the first, and a block has 64 at least.
            int j = last - 1;
            if (causal && j >= 0) step(j--, std::true_type());
            for (; j >= 0; --j) step(j, std::false_type());
            if constexpr (!q_in_registers) shared.q.release(q_at);
            shared.v.wait(v_at);
            start_sum<dtype, block_n>(o, p, v_tiles.after(v_at.stage));
            wait_for(o, p);
            shared.v.release(v_at);
        }

        softmax.finish_by_reciprocal(o);
        if (params.lse != nullptr) softmax.store_lse(order.lse(tile) + warp_row, params.seqlen_q - row);
        start_store<QTile>(shared.o, warp_row, o, maps.o, row, tile.head, tile.batch);
    }
    wait_for_stores();  // shared memory lives as long as its CTA
}
