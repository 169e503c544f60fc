// Zeros for the sums of dQ, written just before they are added to, so that they are still in L2. Those of a tile are written
// by the CTA with the first keys that the tile sees. It was launched before all others that add to the tile, and waits for
// nobody to do so: they may wait for it.
#pragma once
#include "any_attention.cuh"
#include "pipeline/state.cuh"
#include "ptx/griddepcontrol.cuh"
#include "turns.cuh"

constexpr int consumer_warps = 8;
constexpr int counters = 1 + config::deterministic * consumer_warps;  // of a tile of dQ: whether it has zeros; see turns.cuh
using ScoresRing = PipelineState<2>;                                  // the places of dS

// A warp: zeros for the tiles whose first keys are those of this CTA.
__device__ inline void clear_tiles(const CountedWorkspaces &workspaces, const Work &work, const Mask &mask, PassingTiles tiles,
                                   int key_tile) {
    using namespace config;
    wait_for_dependency();  // the counters are zero
#pragma unroll 1
    for (int left = tiles.count(); left > 0; --left, tiles.advance()) {
        if (mask.first_key(tiles.number * block_m) / block_n != key_tile) continue;
        const long long row = work.padded_row(tiles.head, tiles.number);
        float4 *sums = reinterpret_cast<float4 *>(workspaces.dq_sum + row * head_dim) + lane_index();
#pragma unroll 4
        for (int i = 0; i < block_m * head_dim / 4; i += 32) sums[i] = {};
        __syncwarp();
        if (lane_index() == 0) add_release(workspaces.added + row / block_m * counters, 1);
    }
}

// A thread: one more arrival at `ds_full` for each tile, when its dQ has zeros.
__device__ inline void await_zeros(const CountedWorkspaces &workspaces, const Work &work, PassingTiles tiles,
                                   Mbarrier (&ds_empty)[2], Mbarrier (&ds_full)[2]) {
    wait_for_dependency();  // the counters are zero
    ScoresRing at{1};
#pragma unroll 1
    for (int left = tiles.count(); left > 0; --left, tiles.advance(), at.advance()) {
        wait_for_first(workspaces.added + work.padded_row(tiles.head, tiles.number) / config::block_m * counters);
        ds_empty[at.stage].wait(at.parity);
        ds_full[at.stage].arrive();
    }
}
