// Rung 30 with as many CTAs as the GPU holds, each of which computes tile after tile: the next one is copied in time.
#include "30_softmax_under_products/deferred.cuh"
#include "31_persistent/persistent_tiles.cuh"
#include "31_persistent/tma_store.cuh"
#include "config.cuh"
#include "launch.cuh"
#include "pipeline/roles.cuh"
#include "pipeline/tile_pipeline.cuh"
#include "tile/warpgroup_gemm.cuh"

using namespace config;

constexpr int num_consumers = block_m / warpgroup_rows;  // warpgroups; then comes the producer's
using Share = Registers<num_consumers, 1>;

using QTile = SwizzledPanels<block_m, head_dim>;
using KVTile = SwizzledPanels<block_n, head_dim>;

struct Shared {
    alignas(1024) dtype o[QTile::size];
    TilePipeline<QTile, dtype, 1> q;
    TilePipeline<KVTile, dtype, num_stages> k, v;
};
FLASHLADDER_KERNEL(attention_forward, AttentionParams,
                   Launch{Share::num_threads, sizeof(Shared), block_m, block_n}
                       .persistent()
                       .by_tma("q", block_m, 64, 128)
                       .by_tma("k", block_n, 64, 128)
                       .by_tma("v", block_n, 64, 128)
                       .by_tma("o", 16, 64, 128));

extern "C" __global__ void __launch_bounds__(Share::num_threads, 1)
    attention_forward(const __grid_constant__ AttentionParams params, const __grid_constant__ QkvoMaps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);

    PersistentTiles<block_m> tiles(params);
    const int last = params.seqlen_k / block_n - 1;
    if (threadIdx.x == 0) {
        shared.q.init(num_consumers * 4);
        shared.k.init(num_consumers * 4);
        shared.v.init(num_consumers * 4);
        fence_mbarrier_init();
    }
    __syncthreads();  // the barriers are made

    if (warpgroup_index() == num_consumers) {
        release_registers<Share::producer>();
        if (threadIdx.x % warpgroup_threads != 0) return;
        auto q_at = shared.q.producer();
        auto k_at = shared.k.producer(), v_at = shared.v.producer();
        for (; tiles.any(); tiles.next()) {
            const int head = tiles.head(), batch = tiles.batch();
            shared.q.load(q_at, maps.q, tiles.first_row(), head, batch);
            shared.k.load(k_at, maps.k, last * block_n, head, batch);
            for (int j = last; j >= 0; --j) {
                if (j > 0) shared.k.load(k_at, maps.k, (j - 1) * block_n, head, batch);
                shared.v.load(v_at, maps.v, j * block_n, head, batch);
            }
        }
        return;
    }
    take_registers<Share::consumer>();

    const int warp_row = warp_index() * 16;
    ByRows<QTile> q_operand;
    ByRows<KVTile> k_tiles;
    ByColumns<KVTile> v_tiles;
    q_operand.start(shared.q.tiles[0], warp_row);
    k_tiles.start(shared.k.tiles[0]);
    v_tiles.start(shared.v.tiles[0]);
    auto q_at = shared.q.consumer();
    auto k_at = shared.k.consumer(), v_at = shared.v.consumer();
    DeferredSoftmax<16> softmax{params.softmax_scale * log2_e};

    for (; tiles.any(); tiles.next()) {
        Accumulator<16, head_dim> o;  // of this warp
        o.clear();

        // S = Q K^T and P = 2^(unit * S - m) of the first block
        Accumulator<16, block_n> s;
        shared.q.wait(q_at);
        shared.k.wait(k_at);
        start_product<dtype, head_dim>(s, q_operand, k_tiles.after(k_at.stage));
        wait_for(s);
        shared.k.release(k_at);
        softmax.start(s);
        auto p = round_to_operand<dtype>(s);

        for (int j = last - 1; j >= 0; --j) {
            // S = Q K^T of this block, then O += P V of the one before
            shared.k.wait(k_at);
            start_product<dtype, head_dim>(s, q_operand, k_tiles.after(k_at.stage));
            shared.v.wait(v_at);
            start_sum<dtype, block_n>(o, p, v_tiles.after(v_at.stage));

            // P = 2^(unit * S - m); O follows the new m as soon as it is at hand
            wait_for<1>(s);
            shared.k.release(k_at);
            softmax.update(s);
            wait_for(o, p);
            shared.v.release(v_at);
            softmax.rescale(o);
            p = round_to_operand<dtype>(s);
        }
        shared.q.release(q_at);
        shared.v.wait(v_at);
        start_sum<dtype, block_n>(o, p, v_tiles.after(v_at.stage));
        wait_for(o, p);
        shared.v.release(v_at);

        softmax.finish_by_reciprocal(o);
        const int row = tiles.first_row() + warp_row;
        if (params.lse != nullptr) softmax.store_lse(tiles.lse() + warp_row, params.seqlen_q - row);
        start_store<QTile>(shared.o, warp_row, o, maps.o, row, tiles.head(), tiles.batch());
    }
    wait_for_stores();  // shared memory lives as long as its CTA
}
