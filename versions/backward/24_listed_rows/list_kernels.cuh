// What the kernels are lent, and those that make lists of it. Their argument is `Params`, which is named before.
#pragma once
#include "52_listed_blocks/text.cuh"
#include "around_loop.cuh"
#include "backward/24_listed_rows/row_lists.cuh"
#include "decode/cuda/arrivals.cuh"
#include "ptx/griddepcontrol.cuh"

using namespace config;

FLASHLADDER_WORKSPACE(dq_sum, float, "num_heads * (total_q // block_m + batch) * block_m * head_dim * wants_dq");
FLASHLADDER_WORKSPACE(added, unsigned, "num_heads * (total_q // block_m + batch) * 2");
// Where a mask is an expression: what is known of pairs of tiles, of tiles of rows, and the lists.
constexpr Text<48> sets{mask_names_b ? " * batch" : "", mask_names_h ? " * num_heads_k" : ""};
constexpr Text<48> key_tiles{has_mask ? "cdiv(seqlen_k, block_n)" : "0", sets.of};
constexpr Text<48> row_tiles{has_mask ? "cdiv(seqlen_q, block_m)" : "0", sets.of};
FLASHLADDER_WORKSPACE_OF(seen, int, (Count{key_tiles.of, " * cdiv(seqlen_q, block_m)"}));
FLASHLADDER_WORKSPACE_OF(counts, int, (Count{row_tiles.of}));
FLASHLADDER_WORKSPACE_OF(row_lists, int, (Count{key_tiles.of, " * 2 * (cdiv(seqlen_q, block_m) + 2)"}));
FLASHLADDER_COUNTERS_OF(done, (Count{"cdiv(", row_tiles.of, ", 256) * 256"}));  // CTAs, of a tile of rows; of few sizes
struct ListedWorkspaces : CountedWorkspaces {
    int *seen, *counts, *lists;
    unsigned *done;
};
using Places = RowListPlaces<block_m, block_n, has_mask && mask_names_b, has_mask && mask_names_h>;
using Tiles = std::conditional_t<has_mask, PassingListedTiles, PassingTiles>;

// A warp for each pair of tiles; the last CTA of a tile of rows counts. Without a mask there is nothing to do.
constexpr int classifiers = 8;
constexpr Launch classifying = Launch{classifiers * 32, 0, block_m, block_n * classifiers};
FLASHLADDER_KERNEL(classify_tiles, Params, classifying.over(row_tiles.of, "cdiv(seqlen_k, block_n)", "1"));
extern "C" __global__ void __launch_bounds__(classifiers * 32)
    classify_tiles(const __grid_constant__ Params p, const __grid_constant__ ListedWorkspaces workspaces) {
    if constexpr (has_mask) {
        launch_dependents();
        const Places places(p);
        const int set = blockIdx.x / places.row_tiles, row_tile = blockIdx.x % places.row_tiles;
        const int key_tile = blockIdx.y * classifiers + warp_index();
        if (key_tile < places.key_tiles) {
            const int first_row = row_tile * block_m, group = p.num_heads / p.num_heads_k;
            Place at{set / places.heads, 0, 0, 0, p.seqlen_q, p.seqlen_k};
            at.h = mask_names_h ? set % places.heads * group : 0;
            const unsigned found =
                seen_by_tile<block_m, block_n, Mods>(p, Mask{p}, at, mask_names_h ? group : 1, first_row, key_tile * block_n);
            if (lane_index() == 0) places.seen(workspaces.seen, set, key_tile)[row_tile] = found;
        }
        if (is_last_of(gridDim.y, workspaces.done + blockIdx.x))
            count_tiles_of<classifiers>(places, workspaces.seen, workspaces.counts, set, row_tile);
    }
}

// The pass behind it, which ends later, does not need it.
FLASHLADDER_KERNEL(list_rows, Params, (Launch{32, 0, block_m, block_n}.over(key_tiles.of, "1", "1").dependent()));
extern "C" __global__ void __launch_bounds__(32)
    list_rows(const __grid_constant__ Params p, const __grid_constant__ ListedWorkspaces workspaces) {
    if constexpr (has_mask) {
        launch_dependents();
        const Places places(p);
        wait_for_dependency();  // all is seen and counted
        write_row_list(places, workspaces.seen, workspaces.lists, blockIdx.x / places.key_tiles, blockIdx.x % places.key_tiles);
    }
}

// The tiles of rows that see a CTA's keys.
template <class Tiles>
__device__ inline Tiles tiles_of(const Mask &mask, const Work &work, const ListedWorkspaces &workspaces, const TilePlace &place,
                                 int last_key) {
    const int heads = work.p.num_heads / work.p.num_heads_k, first_head = place.head * heads;
    if constexpr (has_mask) {
        const Places places(work.p);
        const long long set = places.set(place.batch, place.head);
        return {places.length(workspaces.lists, set, place.number), places.tiles(workspaces.lists, set, place.number), first_head, heads};
    } else {
        return {mask.first_row(place.number * block_n), min(mask.end_row(last_key), work.seqlen_q), first_head, heads};
    }
}
// Whether some rows of the tile that passes do not see all keys.
__device__ inline bool is_part(const PassingListedTiles &tiles, const Mask &, int) { return __shfl_sync(0xffffffff, tiles.part, 0); }
__device__ inline bool is_part(const PassingTiles &tiles, const Mask &mask, int first_key) {
    return !mask.shows_all(first_key, block_n, tiles.number * block_m, block_m);
}
// How many tiles of keys before this one it sees.
__device__ inline int tiles_before(const PassingListedTiles &tiles, const Mask &, int) { return tiles.before; }
__device__ inline int tiles_before(const PassingTiles &tiles, const Mask &mask, int key_tile) {
    return key_tile - mask.first_key(tiles.number * block_m) / block_n;
}
// Whether a tile of rows sees any keys: nobody writes the sums of dQ of another one.
__device__ inline bool sees_any(const Work &work, const ListedWorkspaces &workspaces, int row_tile, int head) {
    if constexpr (has_mask) {
        const Places places(work.p);
        const long long set = places.set(work.batch, head / (work.p.num_heads / work.p.num_heads_k));
        return *places.count(workspaces.counts, set, row_tile) > 0;
    } else {
        return sees_keys(work, row_tile * block_m);
    }
}
