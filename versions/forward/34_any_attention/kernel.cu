// Rung 33 for any attention: a causal mask, any lengths, grouped heads. CTAs draw their tiles, the longest first.
#include "31_persistent/tma_store.cuh"
#include "33_rare_rescale/rare_rescale.cuh"
#include "34_any_attention/tile_queue.cuh"
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
    ByRows<KVTile> k_tiles;
    ByColumns<KVTile> v_tiles;
    k_tiles.start(shared.k.tiles[0]);
    v_tiles.start(shared.v.tiles[0]);
    auto q_at = shared.q.consumer();
    auto k_at = shared.k.consumer(), v_at = shared.v.consumer();
    RarelyRescaled<16> softmax{params.softmax_scale * log2_e};

    TileReader reader{shared.queue};
    for (int number = reader.next(); number != TileQueue::none; number = reader.next()) {
        const auto tile = order.tile(number);
        const int row = tile.first_row + warp_row;  // of this warp
        const int last = mask.template blocks<block_n>(min(tile.first_row + block_m, params.seqlen_q)) - 1;
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

            for (int j = last - 1; j >= 0; --j) {
                // S = Q K^T of this block, then O += P V of the one before
                shared.k.wait(k_at);
                start_product<dtype, head_dim>(s, q, k_tiles.after(k_at.stage));
                shared.v.wait(v_at);
                start_sum<dtype, block_n>(o, p, v_tiles.after(v_at.stage));

                // P = 2^(unit * S - m); O follows the new m as soon as it is at hand
                wait_for<1>(s);
                if constexpr (causal) mask.hide(s, row, j * block_n);  // else an end may cut the first block alone
                softmax.update(s);
                shared.k.release(k_at, softmax.is_summed());  // so P comes before the wait for O: ptxas would turn them round
                wait_for(o, p);
                shared.v.release(v_at);
                softmax.rescale(o);
                p = round_to_operand<dtype>(s);
            }
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
