// The turns of warps that add dQ from their registers, if `deterministic`.
#pragma once
#include "key_order.cuh"

// Of a part of a tile of dQ, between the warps that add it and a thread that keeps the turns.
struct Turn {
    Mbarrier begun;  // the tiles of keys before this one have been added
    Mbarrier ended;  // each warp has started to add its own

    // Before the other threads come, and `fence_mbarrier_init` after it.
    __device__ void init(int warps) {
        begun.init(1);
        ended.init(warps);
    }
};

// Keeps the turns of the parts of a tile from `first` up to `end`: waits for L2, before and behind the additions, so that warps
// which compute need not.
template <int parts>
__device__ inline void keep_turns(Turn (&turns)[parts], int first, int end, const CountedWorkspaces &workspaces, const Work &work,
                                  const Mask &mask, RowTiles tiles, int key_tile) {
    wait_for_dependency();  // the counters are zero
    const int count = tiles.count();
#pragma unroll 1
    for (int i = 0; i < count; ++i, tiles.advance()) {
        unsigned *added = workspaces.added + work.padded_row(tiles.head, tiles.number) / config::block_m * parts;
        const int before = tiles_before(work.p, mask, key_tile, tiles.number);
#pragma unroll 1
        for (int part = first; part < end; ++part) {
            wait_until_added(added + part, before);
            turns[part].begun.arrive();
            turns[part].ended.wait(i % 2);
            add_release(added + part, 1);  // behind what those warps have added
        }
    }
}
