// A ring of stages between a warp that has TMA load keys, the producer, and the warps that consume them.
#pragma once
#include "pages.cuh"
#include "pipeline/state.cuh"
#include "ptx/sm90.cuh"

// K and V as the host has mapped them, the kernel's last argument. A box is 64 columns wide, a panel of a tile.
struct KvMaps { TensorMapBytes k, v; };

// Rows of a box: it lies in one page. A cache in one piece has boxes of a whole block.
template <int block_n>
constexpr int rows_of_box() {
    return config::paged && config::page_size < block_n ? config::page_size : block_n;
}

// A stage has K and V of a block of keys. Tiles come first: the hardware's swizzle wants them at multiples of 1024 bytes.
template <class Tile, class T, int stages>
struct alignas(1024) PageRing {
    using State = PipelineState<stages>;
    static constexpr int box_rows = rows_of_box<Tile::rows>(), boxes = Tile::rows / box_rows;
    static_assert(box_rows % 8 == 0 && Tile::rows % box_rows == 0, "a box has whole swizzle patterns");
    static_assert(boxes <= 32, "a lane looks up one box");

    struct {
        T k[Tile::size], v[Tile::size];
    } stage[stages];
    Mbarrier full[stages];   // the keys have come
    Mbarrier empty[stages];  // every consuming warp is done with them

    static __device__ State producer() { return {1}; }
    static __device__ State consumer() { return {0}; }

    // Before the other threads come, and `fence_mbarrier_init` after it.
    __device__ void init(int consumer_warps) {
        for (int i = 0; i < stages; ++i) {
            full[i].init(1);
            empty[i].init(consumer_warps);
        }
    }

    // Starts loading a block, once the next stage is empty. A lane's box begins at its `place`; rows behind the last key
    // hold anything. Bytes may come before they are expected: the phase also waits for that arrival.
    __device__ void load(State &at, const KvMaps &maps, int head, KeyPlace place) {
        Mbarrier &comes = full[at.stage];
        empty[at.stage].wait(at.parity);
        if (lane_index() == 0) comes.arrive_expecting(2 * Tile::size * sizeof(T));
        if (lane_index() < boxes) {
            const int first = Tile::step(lane_index() * box_rows, 0);
#pragma unroll
            for (int col = 0; col < Tile::cols; col += 64)
                tma_load(stage[at.stage].k + first + Tile::step(0, col), maps.k, comes, col, place.row, head, place.page);
#pragma unroll
            for (int col = 0; col < Tile::cols; col += 64)
                tma_load(stage[at.stage].v + first + Tile::step(0, col), maps.v, comes, col, place.row, head, place.page);
        }
        at.advance();
    }
    __device__ void wait(const State &at) { full[at.stage].wait(at.parity); }
    __device__ void release(State &at) {  // the warp's lanes are together here
        empty[at.stage].arrive_as_warp();
        at.advance();
    }
};

// Puts zeros into rows from `first` to `end` of a tile, by a warp: P is 0 there, and 0 * V must be 0.
template <class Tile, class T>
__device__ inline void clear_rows_by_warp(T *tile, int first, int end) {
    for (int row = first + lane_index() / 8; row < end; row += 4)
#pragma unroll
        for (int panel = 0; panel < Tile::cols; panel += 64)
            *reinterpret_cast<uint4 *>(tile + Tile::offset(row, panel + lane_index() % 8 * 8)) = {};
}
