// A ring of tiles between a producer, one thread that has TMA load them, and warps that consume them.
#pragma once
#include "pipeline/state.cuh"
#include "pipeline/tma.cuh"

// Tiles and their barriers. Tiles come first: the hardware's swizzle wants them at multiples of 1024 bytes.
template <class Tile, class T, int stages>
struct alignas(1024) TilePipeline {
    using State = PipelineState<stages>;
    T tiles[stages][Tile::size];
    Mbarrier full[stages];   // the tile has come
    Mbarrier empty[stages];  // every consuming warp is done with it

    static __device__ State producer() { return {1}; }
    static __device__ State consumer() { return {0}; }

    // Before the other threads come, and `fence_mbarrier_init` after it.
    __device__ void init(int consumer_warps) {
        for (int stage = 0; stage < stages; ++stage) {
            full[stage].init(1);
            empty[stage].init(consumer_warps);
        }
    }
    // Starts loading rows from `row` on of one head into the next tile, panel by panel, once it is empty.
    __device__ void load(State &at, const TensorMapBytes &map, int row, int head, int batch) {
        empty[at.stage].wait(at.parity);
        load_tile<Tile>(tiles[at.stage], map, full[at.stage], row, head, batch);
        at.advance();
    }
    __device__ void wait(const State &at) { full[at.stage].wait(at.parity); }
    __device__ void release(State &at, bool really = true) {
        if (really) empty[at.stage].arrive_as_warp();
        at.advance();
    }
};
