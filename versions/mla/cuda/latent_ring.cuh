// A ring of blocks of the cache between a warp that has TMA load them, the producer, and the warps that multiply with them.
#pragma once
#include "decode/cuda/page_ring.cuh"
#include "latents.cuh"
#include "tile/warpgroup_gemm.cuh"

// The cache as the host has mapped it, the kernel's last argument. A box is 64 columns wide, a panel of a tile.
struct CacheMap { TensorMapBytes cache; };

// Each panel of a block has a barrier: what is multiplied with the first columns need not wait for the last ones. Of two
// groups of warps, each reads one half of V's columns. It releases that half when P V is done, as all products S = Q K^T
// of the block are done before. What V does not have goes with the second half.
template <class Tile, class T, int stages>
struct alignas(1024) LatentRing {
    using State = PipelineState<stages>;
    static constexpr int half = config::head_dim_v / 128;  // of V, in panels
    static constexpr int box_rows = rows_of_box<Tile::rows>(), boxes = Tile::rows / box_rows;
    static_assert(box_rows % 8 == 0 && Tile::rows % box_rows == 0, "a box has whole swizzle patterns");

    T block[stages][Tile::size];          // first: the hardware's swizzle wants multiples of 1024 bytes
    Mbarrier full[stages][Tile::panels];  // the panel has come
    Mbarrier empty[stages][2];            // every warp of the group is done with its half

    static __device__ State producer() { return {1}; }
    static __device__ State consumer() { return {0}; }

    // Before the other threads come, and `fence_mbarrier_init` after it.
    __device__ void init() {
        for (int i = 0; i < stages; ++i) {
            for (Mbarrier &panel : full[i]) panel.init(1);
            for (Mbarrier &half : empty[i]) half.init(4);
        }
    }

    // Loads all blocks of a part, each half as soon as it is empty, by a warp whose lanes have a box each. Rows behind
    // the last key hold anything.
    template <class Part>
    __device__ void load_all(const Part &part, const CacheMap &map) {
        State at = producer();
        load_all(at, part, map);
    }
    // The same where other parts come before it, and after it.
    template <class Part>
    __device__ void load_all(State &at, const Part &part, const CacheMap &map) {
        auto find = [&](int first) {
            return KeyPlace::find(part.params, part.tile.batch, first + lane_index() * box_rows, part.end);
        };
        KeyPlace place = find(part.begin);  // of the lane's box of the next block
        for (int first = part.begin; first < part.end; first += Tile::rows) {
            const KeyPlace next = find(first + Tile::rows);
            load(at, map, part.tile.head_k, place);
            place = next;
        }
    }
    __device__ void wait(const State &at, int panel) { full[at.stage][panel].wait(at.parity); }
    __device__ void release(State &at, int half) {  // the warp's lanes are together here
        empty[at.stage][half].arrive_as_warp();
        at.advance();
    }

  private:
    // Bytes may come before they are expected: the phase also waits for that arrival.
    __device__ void load(State &at, const CacheMap &map, int head, KeyPlace place) {
        T *to = block[at.stage] + Tile::step(lane_index() * box_rows, 0);
#pragma unroll
        for (int panel = 0; panel < Tile::panels; ++panel) {
            if (panel % half == 0 && panel < 2 * half) empty[at.stage][panel / half].wait(at.parity);
            Mbarrier &comes = full[at.stage][panel];
            if (lane_index() == 0) comes.arrive_expecting(Tile::rows * 64 * sizeof(T));
            if (lane_index() < boxes)
                tma_load(to + Tile::step(0, panel * 64), map.cache, comes, panel * 64, place.row, head, place.page);
        }
        at.advance();
    }
};

// 64 columns of an operand whose rows run along m or n.
template <class Tile>
__device__ inline ByRows<Tile> panel_of(const ByRows<Tile> &operand, int panel) {
    return {operand.first + (Tile::step(0, panel * 64) * 2 >> 4)};
}
