// What a mask by an expression shows rows of some keys.
#pragma once
#include "softmax/expression.cuh"
#include "tile/warpgroup_gemm.cuh"

// What a warpgroup's rows see of a block.
enum Seen : unsigned { something = 1,
                       not_all = 2 };

// What a rectangle's rows see of its keys, as far as it is known without its elements. Where causal or a window cuts it, the
// expression is not evaluated at all of them, so nothing is known.
template <class Mods, class Params, class Mask>
__device__ inline Maybe seen_within(const Params &params, const Mask &mask, Place at, int row, int last_row, int key, int last_key) {
    if (mask.keys(last_row) <= key || mask.first(row) > last_key) return {false, false};
    if (mask.keys(row) <= last_key || mask.first(last_row) > key) return {true, false};
    at.q = row + mask.shift - 1, at.k = key;
    return Mods::mask_within(params, at, Range{at.q, last_row + mask.shift - 1}, Range{key, last_key});
}

// What the rows from `row` up to `end` see of the keys from `first_key` on. A whole warp asks. First each lane asks for an eighth
// of 64 rows and a quarter of the keys at once. Where one does not know, all elements are evaluated, of a key a lane, until
// both are found.
template <int block_n, class Mods, class Params, class Mask>
__device__ inline unsigned seen_of(const Params &params, const Mask &mask, Place at, int row, int end, int first_key) {
    constexpr int together = 8;  // rows
    bool sees = false, misses = false, is_known = true;
    auto found = [&] { return (__any_sync(0xffffffff, sees) ? something : 0u) | (__any_sync(0xffffffff, misses) ? not_all : 0u); };
    const int part_row = row + lane_index() / 4 * (warpgroup_rows / 8), part_key = first_key + lane_index() % 4 * (block_n / 4);
    if (part_row < end) {
        const int last_row = min(part_row + warpgroup_rows / 8, end) - 1;
        const Maybe seen = seen_within<Mods>(params, mask, at, part_row, last_row, part_key, part_key + block_n / 4 - 1);
        sees = seen.must, misses = !seen.may, is_known = sees || misses;
    }
    if (__all_sync(0xffffffff, is_known) || found() == (something | not_all)) return found();
#pragma unroll 1
    for (; row < end; row += together) {
#pragma unroll
        for (int i = 0; i < together; ++i) {
            const int here = min(row + i, end - 1), first = mask.first(here), keys = mask.keys(here);
            at.q = here + mask.shift - 1;
#pragma unroll
            for (int col = 0; col < block_n; col += 32) {
                if (col + lane_index() >= block_n) continue;
                at.k = first_key + col + lane_index();
                const bool is_seen = at.k >= first && at.k < keys && Mods::mask(params, at);
                sees |= is_seen, misses |= !is_seen;
            }
        }
        if (found() == (something | not_all)) break;
    }
    return found();
}
