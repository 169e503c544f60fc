// Which tiles of rows see a tile of keys. By a mask that is an expression this is found out before the loop runs: of each pair
// what the rows see of the keys, of each tile of rows how many tiles of keys it sees, and of each tile of keys a list. There is
// one list for all heads and sequences, unless the expression names them. Heads that share keys share a list, too.
#pragma once
#include "52_listed_blocks/count_taken.cuh"
#include "52_listed_blocks/seen.cuh"

// A tile of rows in a list: its number, whether some of its rows do not see all the keys, and how many tiles of keys before this
// one it sees, too.
struct ListedTile {
    int number_and_part, before;

    __device__ int number() const { return number_and_part >> 1; }
    __device__ bool is_part() const { return number_and_part & 1; }
};

// Where all of this lies, of a sequence and a head of K.
template <int block_m, int block_n, bool per_sequence, bool per_head>
struct RowListPlaces {
    int heads, row_tiles, key_tiles;

    template <class Params>
    __device__ explicit RowListPlaces(const Params &p)
        : heads(per_head ? p.num_heads_k : 1), row_tiles((p.seqlen_q + block_m - 1) / block_m),
          key_tiles((p.seqlen_k + block_n - 1) / block_n) {}

    __device__ long long set(int batch, int head_k) const {
        return (per_sequence ? batch : 0) * heads + (per_head ? head_k : 0);
    }
    // What a tile of keys has of `seen`, an element for each tile of rows: Seen, and how many tiles of keys come before.
    __device__ int *seen(int *all, long long set, int key_tile) const { return all + (set * key_tiles + key_tile) * row_tiles; }
    __device__ int *count(int *all, long long set, int row_tile) const { return all + set * row_tiles + row_tile; }
    // A list: its length, and its tiles.
    __device__ int *length(int *all, long long set, int key_tile) const {
        return all + (set * key_tiles + key_tile) * 2 * (row_tiles + 2);
    }
    __device__ ListedTile *tiles(int *all, long long set, int key_tile) const {
        return reinterpret_cast<ListedTile *>(length(all, set, key_tile) + 2);
    }
};

// The tiles of a list that pass, each of all heads that share the keys: as PassingTiles without one.
struct PassingListedTiles {
    int head, number, before;
    bool part;
    int of_list, first_head, heads;
    const ListedTile *at;

    __device__ PassingListedTiles(const int *length, const ListedTile *tiles, int first_head_, int heads_)
        : head(first_head_), of_list(*length), first_head(first_head_), heads(heads_), at(tiles) {
        take();
    }

    __device__ int count() const { return of_list * heads; }
    __device__ void advance() {
        if (++head < first_head + heads) return;
        head = first_head;
        ++at;
        take();
    }

  private:
    // Behind the last one the list has room for one more, which nobody reads.
    __device__ void take() { number = at->number(), part = at->is_part(), before = at->before; }
};

// A CTA of so many warps: of a tile of rows, counts the tiles of keys that it sees.
template <int warps, class Places>
__device__ inline void count_tiles_of(const Places &places, int *all, int *counts, long long set, int row_tile) {
    int count = 0;
#pragma unroll 1
    for (int first = 0; first < places.key_tiles; first += warps * 32) {
        const int key_tile = first + threadIdx.x;
        int *seen = places.seen(all, set, key_tile) + row_tile;
        const int found = key_tile < places.key_tiles ? *seen : 0;
        const Taken taken = count_taken<warps>(found != 0);
        if (found) *seen = found | count + taken.before << 2;
        count += taken.all;
    }
    if (threadIdx.x == 0) *places.count(counts, set, row_tile) = count;
}

// A warp: a list, from the last tile of rows to the first one.
template <class Places>
__device__ inline void write_row_list(const Places &places, int *all, int *lists, long long set, int key_tile) {
    const int *seen = places.seen(all, set, key_tile);
    ListedTile *to = places.tiles(lists, set, key_tile);
    int length = 0;
#pragma unroll 1
    for (int last = places.row_tiles - 1; last >= 0; last -= 32) {
        const int number = last - lane_index(), found = number >= 0 ? seen[number] : 0;
        const unsigned taken = __ballot_sync(0xffffffff, found != 0);
        if (found) to[length + __popc(taken & ((1u << lane_index()) - 1))] = {number * 2 + ((found & not_all) != 0), found >> 2};
        length += __popc(taken);
    }
    if (lane_index() == 0) *places.length(lists, set, key_tile) = length, to[length] = {};
}

// Which keys a row sees but for the mask, as `seen_of` asks.
template <class Mask>
struct KeysOfRow {
    const Mask &mask;
    int shift = mask.shift + 1;

    __device__ int first(int row) const { return mask.first_key(row); }
    __device__ int keys(int row) const { return mask.end_key(row); }
};

// What the rows of a tile of so many heads from `at.h` on see of a tile of keys.
template <int block_m, int block_n, class Mods, class Params, class Mask>
__device__ inline unsigned seen_by_tile(const Params &p, const Mask &mask, Place at, int heads, int first_row, int first_key) {
    const int end_row = min(first_row + block_m, p.seqlen_q), last_key = min(first_key + block_n, p.seqlen_k) - 1;
    if (mask.first_row(first_key) >= end_row || mask.end_row(last_key) <= first_row) return 0;
    unsigned found = end_row < first_row + block_m ? not_all : 0;  // rows behind the last one see nothing
    for (const int end = at.h + heads; at.h < end; ++at.h)
        for (int row = first_row; row < end_row; row += warpgroup_rows)
            found |= seen_of<block_n, Mods>(p, KeysOfRow<Mask>{mask}, at, row, min(row + warpgroup_rows, end_row), first_key);
    return found & something ? found : 0;
}
