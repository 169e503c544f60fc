// Rung 27 with several tiles of K and V: the producer is ahead of the consumers.
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
    dtype k[num_stages][KVTile::size];
    dtype v[num_stages][KVTile::size];
    Mbarrier q_full, k_full[num_stages], v_full[num_stages];
    Mbarrier k_empty[num_stages], v_empty[num_stages];  // every consumer's warp has read the tile
};
FLASHLADDER_QKV_LAUNCH(Share::num_threads, sizeof(Shared), block_m, block_n);

extern "C" __global__ void __launch_bounds__(Share::num_threads, ctas_per_sm)
    attention_forward(const __grid_constant__ AttentionParams params, const __grid_constant__ QkvMaps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);

    const QueryBlock<dtype, block_m> block{params};
    const int last = params.seqlen_k / block_n - 1;
    if (threadIdx.x == 0) {
        shared.q_full.init(1);
        for (int stage = 0; stage < num_stages; ++stage) {
            for (Mbarrier *full : {&shared.k_full[stage], &shared.v_full[stage]}) full->init(1);
            for (Mbarrier *empty : {&shared.k_empty[stage], &shared.v_empty[stage]}) empty->init(num_consumers * 4);
        }
        fence_mbarrier_init();
    }
    __syncthreads();  // the barriers are made

    if (warpgroup_index() == num_consumers) {
        give_registers_back<Share::producer>();
        if (threadIdx.x % warpgroup_threads != 0) return;
        load_tile<QTile>(shared.q, maps.q, shared.q_full, block.first_row, block.head, block.batch);
        RingPlace<num_stages> at{1};
        for (int j = last; j >= 0; --j, at.next()) {
            shared.k_empty[at.stage].wait(at.parity);
            load_tile<KVTile>(shared.k[at.stage], maps.k, shared.k_full[at.stage], j * block_n, block.head, block.batch);
            shared.v_empty[at.stage].wait(at.parity);
            load_tile<KVTile>(shared.v[at.stage], maps.v, shared.v_full[at.stage], j * block_n, block.head, block.batch);
        }
        return;
    }
    take_registers<Share::consumer>();

    const int warp_row = warp_index() * 16;
    const ByRows<QTile> q_operand(shared.q);
    const ByRows<KVTile> k_tiles(shared.k[0]);
    const ByColumns<KVTile> v_tiles(shared.v[0]);

    Accumulator<16, head_dim> o;  // of this warp
    OnlineSoftmax<16> softmax{params.softmax_scale * log2_e};
    o.clear();
    softmax.clear();
    RingPlace<num_stages> at{0};
    shared.q_full.wait(0);

    for (int j = last; j >= 0; --j, at.next()) {
        // S = Q K^T
        shared.k_full[at.stage].wait(at.parity);
        Accumulator<16, block_n> s;
        start_product<dtype, head_dim>(s, q_operand, k_tiles.after(at.stage));
        wait_for(s);
        shared.k_empty[at.stage].arrive_as_warp();

        // P = 2^(unit * S - m); O and l follow the new m
        softmax.update(s, o);

        // O += P V
        auto p = round_to_operand<dtype>(s);
        shared.v_full[at.stage].wait(at.parity);
        start_sum<dtype, block_n>(o, p, v_tiles.after(at.stage));
        wait_for(o);
        shared.v_empty[at.stage].arrive_as_warp();
    }

    softmax.finish_by_reciprocal(o);
    if (params.lse != nullptr) softmax.store_lse(block.lse() + warp_row);

    named_barrier_sync(1, warpgroup_threads);  // every warp has read Q, whose place O takes
    store_to_shared_hoisted<QTile>(shared.q, warp_row, o);
    __syncwarp();
    store_rows<QTile, 16, StoreNoAllocate>(block.o(), params.o_stride.row, shared.q, warp_row);
}
