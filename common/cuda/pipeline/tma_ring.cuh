// Tiles that TMA brings from global memory: one thread asks, and an mbarrier tells when all bytes have come.
#pragma once
#include "ptx/sm90.cuh"
#include "tile/layout.cuh"

// Q, K, V and O as the host has mapped them, the second kernel argument. A box is 64 columns wide, a panel of a tile. Rows
// past the end of a tensor come as zeros.
struct QkvMaps {
    TensorMapBytes q, k, v;
};
struct QkvoMaps {
    TensorMapBytes q, k, v, o;
};

// Starts copying rows from `row` on of one head to a tile, panel by panel. One thread calls it.
template <class Tile, class T>
__device__ inline void load_tile(T *shared, const TensorMapBytes &map, Mbarrier &full, int row, int head, int batch) {
    full.arrive_expecting(Tile::size * sizeof(T));
#pragma unroll
    for (int panel = 0; panel < Tile::panels; ++panel)
        tma_load(shared + Tile::step(0, panel * 64), map, full, panel * 64, row, head, batch);
}

// A ring of tiles between a producer, one thread, and warps that read. Both go round it with a `Place` of their own. The tiles
// may lie `apart`: with them the ring takes 1 KB more than they, for their alignment.
template <class Tile, class T, int stages, bool apart = false>
struct alignas(apart ? 8 : 1024) TmaRing {
    T tiles[apart ? 0 : stages][Tile::size];
    Mbarrier full[stages];   // the tile has come
    Mbarrier empty[stages];  // every reading warp is done with it

    // The parity is that of the phase which the user waits for. A reader begins with 0. The producer begins with 1: the
    // phase before the first one counts as ended, as all tiles are empty.
    struct Place {
        uint32_t parity;
        int stage = 0;

        __device__ void next() {
            if (++stage < stages) return;
            stage = 0;
            parity ^= 1;
        }
    };
    static __device__ Place of_producer() { return {1}; }
    static __device__ Place of_reader() { return {0}; }

    // Before the other threads come, and `fence_mbarrier_init` after it.
    __device__ void init(int reading_warps) {
        for (int stage = 0; stage < stages; ++stage) {
            full[stage].init(1);
            empty[stage].init(reading_warps);
        }
    }
    __device__ void fill(Place &at, const TensorMapBytes &map, int row, int head, int batch, T (*there)[Tile::size] = nullptr) {
        empty[at.stage].wait(at.parity);
        load_tile<Tile>((apart ? there : tiles)[at.stage], map, full[at.stage], row, head, batch);
        at.next();
    }
    __device__ void wait(const Place &at) { full[at.stage].wait(at.parity); }
    __device__ void release(Place &at, bool really = true) {
        if (really) empty[at.stage].arrive_as_warp();
        at.next();
    }
};
