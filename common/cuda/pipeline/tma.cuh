// Tiles that TMA brings from global memory: one thread asks, and an mbarrier tells when all bytes have come.
#pragma once
#include "ptx/sm90.cuh"

// Q, K, V and O as the host has mapped them, the second kernel argument. A box is a panel of a tile wide. Rows and
// columns past the end of a tensor come as zeros.
struct QkvMaps { TensorMapBytes q, k, v; };
struct QkvoMaps { TensorMapBytes q, k, v, o; };

// Starts copying rows from `row` on of one head to a tile, panel by panel, of columns from `col` on. One thread calls it.
template <class Tile, class T>
__device__ inline void load_tile(T *shared, const TensorMapBytes &map, Mbarrier &full, int row, int head, int batch, int col = 0) {
    full.arrive_expecting(Tile::panels * Tile::rows * Tile::row_pitch * sizeof(T));  // what lies behind its panels is not loaded
#pragma unroll
    for (int panel = 0; panel < Tile::panels; ++panel)
        tma_load(shared + Tile::step(0, panel * Tile::row_pitch), map, full, col + panel * Tile::row_pitch, row, head, batch);
}
