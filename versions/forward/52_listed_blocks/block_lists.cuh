// Which blocks of keys the rows of a tile see. By a mask that is an expression this is found out before attention runs: a
// class for each block, and of the classes a list for each tile. There is one list for all heads and sequences, unless the
// expression names them.
#pragma once
#include "52_listed_blocks/count_taken.cuh"
#include "52_listed_blocks/seen.cuh"
#include "ptx/griddepcontrol.cuh"
#include "schedule/order.cuh"
#include "schedule/packed.cuh"
#include "schedule/work_tile.cuh"
#include "softmax/expression.cuh"
#include "softmax/mask.cuh"

// Of a tile of rows. Blocks that all its rows see whole come first, then those that some row sees in part; each in the order
// of their keys.
struct BlockList {
    static constexpr int most_groups = 4;
    int num_whole, num_blocks;
    int ends[most_groups];  // of a warpgroup of the tile: behind the last block in the list that some of its rows sees
    int unused[2];
    static constexpr int words = 8;

    __device__ const int *blocks() const { return reinterpret_cast<const int *>(this) + words; }
    __device__ int *blocks() { return reinterpret_cast<int *>(this) + words; }
};

constexpr unsigned something_of_any = 0x55 * something, not_all_of_any = 0x55 * not_all;  // of a class: 2 bits a warpgroup

// A work tile that has a list, and the number of its sequence.
struct ListedTile : WorkTile {
    int sequence;

    __device__ Place place() const { return {sequence, head, 0, 0, seqlen_q, seqlen_k}; }
};

// Where classes and lists lie: of `tiles` tiles each head's, or those of all heads. `blocks` are as many as a list may have.
struct ListPlaces {
    int num_heads, tiles, blocks;

    __device__ unsigned char *classes(unsigned char *all, int number) const { return all + static_cast<long long>(number) * blocks; }
    __device__ BlockList *list(int *all, int number) const {
        return reinterpret_cast<BlockList *>(all + static_cast<long long>(number) * (blocks + BlockList::words));
    }
};

template <int block_m, int block_n, bool is_uneven, bool per_sequence, bool per_head>
struct DenseLists : ListPlaces {
    __device__ explicit DenseLists(const AttentionParams &params, int *)
        : ListPlaces{params.num_heads, (params.seqlen_q + block_m - 1) / block_m, (params.seqlen_k + block_n - 1) / block_n} {}

    // The number of a list. A tile may begin where it would not fit above the one before: then it is the first.
    __device__ int number(int sequence, int head, int first_row) const {
        const int tile = (first_row + block_m - 1) / block_m;
        return ((per_sequence ? sequence : 0) * (per_head ? num_heads : 1) + (per_head ? head : 0)) * tiles + tile;
    }
    // The same of a work tile.
    template <class Get>
    __device__ int number_of(Get get, int first_row) const {
        return number(get(&WorkTile::batch_q), get(&WorkTile::head), first_row);
    }
    __device__ ListedTile tile(const AttentionParams &params, int number) const {
        const int list = number / tiles;
        ListedTile found{};
        set_rows<block_m, is_uneven>(found, number % tiles, tiles, params.seqlen_q);
        found.sequence = per_head ? list / num_heads : list, found.head = per_head ? list % num_heads : 0;
        found.seqlen_q = params.seqlen_q, found.seqlen_k = params.seqlen_k;
        return found;
    }
    __device__ int blocks_of(const ListedTile &) const { return blocks; }
    __device__ void note(const ListedTile &, int) const {}
};

// Of packed sequences nobody knows how many tiles there are before kernels run. A sequence's tiles have numbers from
// begin / block_m + b on: so none has another's, and numbers are below total_q / block_m + batch + 1. `numbers` has them, by
// the tiles' first rows.
template <int block_m, int block_n, bool is_uneven, bool per_head>
struct PackedLists : ListPlaces {
    int *const numbers;

    __device__ explicit PackedLists(const PackedParams &params, int *numbers_)
        : ListPlaces{params.num_heads, params.total_q / block_m + params.batch + 1, (params.seqlen_k + block_n - 1) / block_n},
          numbers(numbers_) {}

    template <class Get>
    __device__ int number_of(Get get, int first_row) const {
        const int row = get(&WorkTile::batch_q) - get(&WorkTile::seqlen_q) + first_row;
        return (per_head ? get(&WorkTile::head) * tiles : 0) + numbers[max(row, 0)];  // below 0 it is no tile
    }
    // A whole warp asks. A tile of this number may have no rows.
    __device__ ListedTile tile(const PackedParams &params, int number) const {
        auto first_of = [&](int b) { return rows_of(params, b).begin / block_m + b; };
        int begun = 0;  // sequences whose tiles begin at this number or before
        for (int b = lane_index(); b <= params.batch; b += 32) begun += first_of(b) <= number % tiles;
        ListedTile found{};
        found.sequence = max(__reduce_add_sync(0xffffffff, begun) - 1, 0), found.head = number / tiles;
        const Sequence q = rows_of(params, found.sequence), k = keys_of(params, found.sequence);
        const int its_tiles = (q.length + block_m - 1) / block_m, within = number % tiles - first_of(found.sequence);
        if (within >= 0 && within < its_tiles) set_rows<block_m, is_uneven>(found, within, its_tiles, q.length);
        found.seqlen_q = q.length, found.seqlen_k = k.length, found.batch_q = q.begin + q.length;
        return found;
    }
    __device__ int blocks_of(const ListedTile &tile) const { return min((tile.seqlen_k + block_n - 1) / block_n, blocks); }
    __device__ void note(const ListedTile &tile, int number) const {
        if (tile.end_row > 0 && number < tiles && threadIdx.x == 0)
            numbers[tile.batch_q - tile.seqlen_q + tile.first_row] = number;
    }
};

// The class of block j of a tile. What the causal mask and a window hide whole is not asked.
template <int block_n, class Mods, class Params, class Mask>
__device__ inline unsigned class_of(const Params &params, const Mask &mask, const Place &at, int first_row, int end_row, int j) {
    unsigned found = 0;
    if (j >= mask.template first_block<block_n>(first_row) && j < mask.template blocks<block_n>(end_row))
#pragma unroll 1
        for (int row = first_row, bits = 0; row < end_row; row += warpgroup_rows, bits += 2)
            found |= seen_of<block_n, Mods>(params, mask, at, row, min(row + warpgroup_rows, end_row), j * block_n) << bits;
    return found;
}

// A tile's list, of its classes. A CTA of so many warps writes it.
template <int warps>
__device__ inline void write_list(BlockList &list, const unsigned char *classes, int blocks) {
    __shared__ int ends[BlockList::most_groups];
    int count = 0;
    if (threadIdx.x < BlockList::most_groups) ends[threadIdx.x] = 0;
    auto append = [&](bool whole) {
#pragma unroll 1
        for (int first = 0; first < blocks; first += warps * 32) {
            const int j = first + threadIdx.x;
            const unsigned found = j < blocks ? classes[j] : 0;
            const bool is_taken = (found & something_of_any) && whole == !(found & not_all_of_any);
            const Taken taken = count_taken<warps>(is_taken);
            if (is_taken) {
                const int at = count + taken.before;
                list.blocks()[at] = j;
#pragma unroll
                for (int group = 0; group < BlockList::most_groups; ++group)
                    if (found >> 2 * group & something) atomicMax(&ends[group], at + 1);
            }
            count += taken.all;
        }
    };
    append(true);
    if (threadIdx.x == 0) list.num_whole = count;
    append(false);
    if (threadIdx.x == 0) list.num_blocks = count;
    __syncthreads();  // all ends are known
    if (threadIdx.x < BlockList::most_groups) list.ends[threadIdx.x] = ends[threadIdx.x];
}

// The blocks that a work tile sees, numbered; they are taken from the last number down. Without a list these are numbers of
// blocks of keys.
template <int block_n, class Mask>
struct BlocksInRange {
    const Mask &mask;

    __device__ void wait() const {}
    template <class Get>
    __device__ void take(Get, int, int = 0) {}
    __device__ int of_tile(int end_row) const { return mask.template blocks<block_n>(end_row); }
    __device__ int of_group(int end_row) const { return of_tile(end_row); }
    __device__ auto lowest(int first_row) const { return mask.template first_block<block_n>(first_row); }
    __device__ auto lowest_whole(int last_row) const { return mask.template first_plain_block<block_n>(last_row); }
    __device__ int first_key(int j) const { return j * block_n; }
};

// With one they are places in it.
template <int block_n, class Places>
struct ListedBlocks {
    const Places places;
    int *const lists;
    const BlockList *list;
    int num_blocks, whole, end;  // of a warpgroup

    // Once, before the first one: the kernel before makes them.
    __device__ void wait() const { wait_for_dependency(); }
    // Of a tile, the list; and of a warpgroup of it.
    template <class Get>
    __device__ void take(Get get, int first_row, int group = 0) {
        list = places.list(lists, places.number_of(get, first_row));
        num_blocks = list->num_blocks, whole = list->num_whole, end = list->ends[group];
    }
    __device__ int of_tile(int) const { return num_blocks; }
    __device__ int of_group(int) const { return uniform(end); }
    __device__ int num_whole() const { return uniform(whole); }
    __device__ Zero lowest(int) const { return {}; }
    __device__ Zero lowest_whole(int) const { return {}; }
    __device__ int first_key(int j) const { return list->blocks()[j] * block_n; }

  private:
    // A whole warp's.
    __device__ static int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }
};
