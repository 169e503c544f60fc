// Rung 25 with tiles that TMA copies: one thread asks for a tile, and an mbarrier tells when it has come.
#include "config.cuh"
#include "epilogue/store.cuh"
#include "launch.cuh"
#include "pipeline/tma.cuh"
#include "schedule/query_block.cuh"
#include "softmax/online.cuh"
#include "tile/warpgroup_gemm.cuh"

using namespace config;

constexpr int num_threads = warpgroup_threads;

using QTile = SwizzledPanels<block_m, head_dim>;
using KVTile = SwizzledPanels<block_n, head_dim>;

struct Shared {
    dtype q[QTile::size];
    dtype k[KVTile::size];
    dtype v[KVTile::size];
    Mbarrier q_full, k_full, v_full;
};
FLASHLADDER_KERNEL(attention_forward, AttentionParams,
                   Launch{num_threads, sizeof(Shared), block_m, block_n}
                       .by_tma("q", block_m, 64, 128)
                       .by_tma("k", block_n, 64, 128)
                       .by_tma("v", block_n, 64, 128));

extern "C" __global__ void __launch_bounds__(num_threads)
    attention_forward(const __grid_constant__ AttentionParams params, const __grid_constant__ QkvMaps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);

    const QueryBlock<dtype, block_m> block{params};
    const int warp_row = warp_index() * 16;
    const int last = params.seqlen_k / block_n - 1;
    const bool is_producer = threadIdx.x == 0;
    auto load_k = [&](int j) { load_tile<KVTile>(shared.k, maps.k, shared.k_full, j * block_n, block.head, block.batch); };
    auto load_v = [&](int j) { load_tile<KVTile>(shared.v, maps.v, shared.v_full, j * block_n, block.head, block.batch); };

    if (is_producer) {
        shared.q_full.init(1);
        shared.k_full.init(1);
        shared.v_full.init(1);
        fence_mbarrier_init();
        load_tile<QTile>(shared.q, maps.q, shared.q_full, block.first_row, block.head, block.batch);
        load_k(last);
        load_v(last);
    }
    __syncthreads();  // the barriers are made

    ByRows<QTile> q_operand;
    ByRows<KVTile> k_operand;
    ByColumns<KVTile> v_operand;
    q_operand.start(shared.q);
    k_operand.start(shared.k);
    v_operand.start(shared.v);

    Accumulator<16, head_dim> o;  // of this warp
    OnlineSoftmax<16> softmax{params.softmax_scale * log2_e};
    o.clear();
    softmax.clear();
    uint32_t parity = 0;  // of the phase in which this block's tiles come
    shared.q_full.wait(0);

    for (int j = last; j >= 0; --j) {
        // S = Q K^T
        shared.k_full.wait(parity);
        Accumulator<16, block_n> s;
        start_product<dtype, head_dim>(s, q_operand, k_operand);
        wait_for(s);

        __syncthreads();  // every warp has read K
        if (is_producer && j > 0) load_k(j - 1);

        // P = 2^(unit * S - m); O and l follow the new m
        softmax.update(s, o);

        // O += P V
        auto p = round_to_operand<dtype>(s);
        shared.v_full.wait(parity);
        start_sum<dtype, block_n>(o, p, v_operand);
        wait_for(o);

        __syncthreads();  // every warp has read V
        if (is_producer && j > 0) load_v(j - 1);
        parity ^= 1;
    }

    softmax.finish_by_reciprocal(o);
    if (params.lse != nullptr) softmax.store_lse(block.lse() + warp_row);

    // The last barrier came after all products that read Q. O takes its place.
    store_to_shared_hoisted<QTile>(shared.q, warp_row, o);
    __syncwarp();
    store_rows<QTile, 16, StoreNoAllocate>(block.o(), params.o_stride.row, shared.q, warp_row);
}
