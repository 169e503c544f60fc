// Tiles that TMA brings from global memory: one thread asks, and an mbarrier tells when all bytes have come.
#pragma once
#include "layout.cuh"
#include "ptx_async.cuh"

// Q, K and V as the host has mapped them, the second kernel argument. Boxes are 64 columns wide, a panel of a tile; rows
// past the end come as zeros.
struct QkvMaps {
    TensorMapBytes q, k, v;
};

#define FLASHLADDER_QKV_LAUNCH(num_threads, shared_bytes, block_m, block_n)                                          \
    FLASHLADDER_KERNEL(attention_forward, AttentionParams,                                                           \
                       Launch{num_threads, shared_bytes, block_m, block_n}                                           \
                           .by_tma("q", block_m, 64, 128)                                                            \
                           .by_tma("k", block_n, 64, 128)                                                            \
                           .by_tma("v", block_n, 64, 128))

// Starts copying rows from `row` on of one head to a tile, panel by panel. One thread calls it.
template <class Tile, class T>
__device__ inline void load_tile(T *shared, const TensorMapBytes &map, Mbarrier &full, int row, int head, int batch) {
    full.arrive_expecting(Tile::size * sizeof(T));
#pragma unroll
    for (int panel = 0; panel < Tile::panels; ++panel)
        tma_load(shared + Tile::step(0, panel * 64), map, full, panel * 64, row, head, batch);
}
