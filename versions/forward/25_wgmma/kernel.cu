// Rung 16's order with Hopper's matrix products: a warpgroup of four warps multiplies together, and reads its operands
// from shared memory by itself.
#include "config.cuh"
#include "epilogue/store.cuh"
#include "pipeline/copy.cuh"
#include "ptx/sm90.cuh"
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
};
FLASHLADDER_LAUNCH(num_threads, sizeof(Shared), block_m, block_n);

// Copies of all threads have landed, and products may read them.
__device__ inline void wait_for_copies() {
    cp_async_wait<0>();
    fence_proxy_async();
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(num_threads)
    attention_forward(const __grid_constant__ AttentionParams params) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);

    const QueryBlock<dtype, block_m> block{params};
    const int warp_row = warp_index() * 16;

    copy_tile<QTile, 4>(shared.q, block.q(), params.q_stride.row);
    TileCopier<KVTile, 4, dtype> k_copier, v_copier;
    k_copier.start(shared.k, block.k(), params.k_stride.row);
    v_copier.start(shared.v, block.v(), params.v_stride.row);
    const int last = params.seqlen_k / block_n - 1;
    k_copier.copy(last);
    cp_async_commit();

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

    for (int j = last; j >= 0; --j) {
        wait_for_copies();  // K is there, Q too at first, and every warp has read the previous V
        v_copier.copy(j);
        cp_async_commit();

        // S = Q K^T
        Accumulator<16, block_n> s;
        start_product<dtype, head_dim>(s, q_operand, k_operand);
        wait_for(s);

        wait_for_copies();  // V is there, and every warp has read K
        if (j > 0) {
            k_copier.copy(j - 1);
            cp_async_commit();
        }

        // P = 2^(unit * S - m); O and l follow the new m
        softmax.update(s, o);

        // O += P V
        auto p = round_to_operand<dtype>(s);
        start_sum<dtype, block_n>(o, p, v_operand);
        wait_for(o);
    }

    softmax.finish_by_reciprocal(o);
    if (params.lse != nullptr) softmax.store_lse(block.lse() + warp_row);

    // The last barrier came after all products that read Q. O takes its place.
    store_to_shared_hoisted<QTile>(shared.q, warp_row, o);
    __syncwarp();
    store_rows<QTile, 16, StoreNoAllocate>(block.o(), params.o_stride.row, shared.q, warp_row);
}
