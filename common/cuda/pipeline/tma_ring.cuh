// A ring of tiles that TMA fills.
#pragma once
#include "pipeline/tma.cuh"

// A ring of tiles between a producer, one thread, and warps that read. Both go round it with a `Place` of their own.
template <class Tile, class T, int stages>
struct alignas(1024) TmaRing {
    T tiles[stages][Tile::size];
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
    __device__ void fill(Place &at, const TensorMapBytes &map, int row, int head, int batch) {
        empty[at.stage].wait(at.parity);
        load_tile<Tile>(tiles[at.stage], map, full[at.stage], row, head, batch);
        at.next();
    }
    __device__ void wait(const Place &at) { full[at.stage].wait(at.parity); }
    __device__ void release(Place &at, bool really = true) {
        if (really) empty[at.stage].arrive_as_warp();
        at.next();
    }
};
