// A ring of tiles of Q or dO between a producer, one thread that has TMA load them, and warps that consume them. With
// each tile comes a number for each of its rows: lse with Q, delta with dO.
#pragma once
#include "pipeline/state.cuh"
#include "pipeline/tma.cuh"

template <class Tile, class T, int stages>
struct alignas(1024) RowPipeline {
    using State = PipelineState<stages>;
    T tiles[stages][Tile::size];
    float numbers[stages][Tile::rows];
    Mbarrier full[stages];   // the tile and its numbers have come
    Mbarrier empty[stages];  // every consuming warp is done with them

    static __device__ State producer() { return {1}; }
    static __device__ State consumer() { return {0}; }

    // Before the other threads come, and `fence_mbarrier_init` after it.
    __device__ void init(int consumer_warps) {
        for (int stage = 0; stage < stages; ++stage) {
            full[stage].init(2);
            empty[stage].init(consumer_warps);
        }
    }
    // Starts loading rows from `row` on of one head, and their numbers, once the next place is empty.
    __device__ void load(const State &at, const TensorMapBytes &map, int row, int head, int batch, const float *of_rows) {
        Mbarrier &loaded = full[at.stage];
        empty[at.stage].wait(at.parity);
        load_tile<Tile>(tiles[at.stage], map, loaded, row, head, batch);
        loaded.arrive_expecting(sizeof numbers[0]);
        bulk_load(numbers[at.stage], of_rows, sizeof numbers[0], loaded);
    }
    __device__ void wait(const State &at) { full[at.stage].wait(at.parity); }
    // All lanes of the warp have read their numbers, and are together again.
    __device__ void release(int stage) { empty[stage].arrive_as_warp(); }
};
