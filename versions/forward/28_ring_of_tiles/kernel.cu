// Rung 27 with several tiles of K and V: the producer is ahead of the consumers.
#include "config.cuh"
#include "epilogue/store.cuh"
#include "launch.cuh"
#include "pipeline/roles.cuh"
#include "pipeline/tile_pipeline.cuh"
#include "schedule/query_block.cuh"
#include "softmax/online.cuh"
#include "tile/warpgroup_gemm.cuh"

using namespace config;

constexpr int num_consumers = 1;  // warpgroups; then comes the producer's
using Share = Registers<num_consumers, ctas_per_sm>;

using QTile = SwizzledPanels<block_m, head_dim>;
using KVTile = SwizzledPanels<block_n, head_dim>;

struct Shared {
    TilePipeline<QTile, dtype, 1> q;
    TilePipeline<KVTile, dtype, num_stages> k, v;
};
FLASHLADDER_KERNEL(attention_forward, AttentionParams,
                   Launch{Share::num_threads, sizeof(Shared), block_m, block_n}
                       .by_tma("q", block_m, 64, 128)
                       .by_tma("k", block_n, 64, 128)
                       .by_tma("v", block_n, 64, 128));

extern "C" __global__ void __launch_bounds__(Share::num_threads, ctas_per_sm)
    attention_forward(const __grid_constant__ AttentionParams params, const __grid_constant__ QkvMaps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);

    const QueryBlock<dtype, block_m> block{params};
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
        shared.q.load(q_at, maps.q, block.first_row, block.head, block.batch);
        for (int j = last; j >= 0; --j) {
            shared.k.load(k_at, maps.k, j * block_n, block.head, block.batch);
            shared.v.load(v_at, maps.v, j * block_n, block.head, block.batch);
        }
        return;
    }
    take_registers<Share::consumer>();

    const int warp_row = warp_index() * 16;
    ByRows<QTile> q_operand;
    ByRows<KVTile> k_tiles;
    ByColumns<KVTile> v_tiles;
    q_operand.start(shared.q.tiles[0]);
    k_tiles.start(shared.k.tiles[0]);
    v_tiles.start(shared.v.tiles[0]);
    auto k_at = shared.k.consumer(), v_at = shared.v.consumer();

    Accumulator<16, head_dim> o;  // of this warp
    OnlineSoftmax<16> softmax{params.softmax_scale * log2_e};
    o.clear();
    softmax.clear();
    shared.q.wait(shared.q.consumer());

    for (int j = last; j >= 0; --j) {
        // S = Q K^T
        shared.k.wait(k_at);
        Accumulator<16, block_n> s;
        start_product<dtype, head_dim>(s, q_operand, k_tiles.after(k_at.stage));
        wait_for(s);
        shared.k.release(k_at);

        // P = 2^(unit * S - m); O and l follow the new m
        softmax.update(s, o);

        // O += P V
        auto p = round_to_operand<dtype>(s);
        shared.v.wait(v_at);
        start_sum<dtype, block_n>(o, p, v_tiles.after(v_at.stage));
        wait_for(o);
        shared.v.release(v_at);
    }

    softmax.finish_by_reciprocal(o);
    if (params.lse != nullptr) softmax.store_lse(block.lse() + warp_row);

    dtype *shared_o = shared.q.tiles[0];
    named_barrier_sync(1, warpgroup_threads);  // every warp has read Q, whose place O takes
    store_to_shared_hoisted<QTile>(shared_o, warp_row, o);
    __syncwarp();
    store_rows<QTile, 16, StoreNoAllocate>(block.o(), params.o_stride.row, shared_o, warp_row);
}
