// Rung 26 with a warp that does nothing but ask for tiles. The others wait for tiles, and for nothing else.
#include "block.cuh"
#include "config.cuh"
#include "launch.cuh"
#include "roles.cuh"
#include "softmax.cuh"
#include "store.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

using namespace config;

constexpr int num_consumers = 1;  // warpgroups; then comes the producer's
using Share = Registers<num_consumers, ctas_per_sm>;

using QTile = SwizzledPanels<block_m, head_dim>;
using KVTile = SwizzledPanels<block_n, head_dim>;

struct Shared {
    dtype q[QTile::size];
    dtype k[KVTile::size];
    dtype v[KVTile::size];
    Mbarrier q_full, k_full, v_full;
    Mbarrier k_empty, v_empty;  // every consumer's warp has read the tile
};
FLASHLADDER_QKV_LAUNCH(Share::num_threads, sizeof(Shared), block_m, block_n);

extern "C" __global__ void __launch_bounds__(Share::num_threads, ctas_per_sm)
    attention_forward(const __grid_constant__ AttentionParams params, const __grid_constant__ QkvMaps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);

    const QueryBlock<dtype, block_m> block{params};
    const int last = params.seqlen_k / block_n - 1;
    if (threadIdx.x == 0) {
        for (Mbarrier *full : {&shared.q_full, &shared.k_full, &shared.v_full}) full->init(1);
        for (Mbarrier *empty : {&shared.k_empty, &shared.v_empty}) empty->init(num_consumers * 4);
        fence_mbarrier_init();
    }
    __syncthreads();  // the barriers are made

    if (warpgroup_index() == num_consumers) {
        give_registers_back<Share::producer>();
        if (threadIdx.x % warpgroup_threads != 0) return;
        load_tile<QTile>(shared.q, maps.q, shared.q_full, block.first_row, block.head, block.batch);
        uint32_t parity = 1;  // of the phase that ends when the tile before has been read; at first there is none
        for (int j = last; j >= 0; --j) {
            shared.k_empty.wait(parity);
            load_tile<KVTile>(shared.k, maps.k, shared.k_full, j * block_n, block.head, block.batch);
            shared.v_empty.wait(parity);
            load_tile<KVTile>(shared.v, maps.v, shared.v_full, j * block_n, block.head, block.batch);
            parity ^= 1;
        }
        return;
    }
    take_registers<Share::consumer>();

    const int warp_row = warp_index() * 16;
    const ByRows<QTile> q_operand(shared.q);
    const ByRows<KVTile> k_operand(shared.k);
    const ByColumns<KVTile> v_operand(shared.v);

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
        shared.k_empty.arrive_as_warp();

        // P = 2^(unit * S - m); O and l follow the new m
        softmax.update(s, o);

        // O += P V
        auto p = round_to_operand<dtype>(s);
        shared.v_full.wait(parity);
        start_sum<dtype, block_n>(o, p, v_operand);
        wait_for(o);
        shared.v_empty.arrive_as_warp();
        parity ^= 1;
    }

    softmax.finish_by_reciprocal(o);
    if (params.lse != nullptr) softmax.store_lse(block.lse() + warp_row);

    named_barrier_sync(1, warpgroup_threads);  // every warp has read Q, whose place O takes
    store_to_shared_hoisted<QTile>(shared.q, warp_row, o);
    __syncwarp();
    store_rows<QTile, 16, StoreNoAllocate>(block.o(), params.o_stride.row, shared.q, warp_row);
}
