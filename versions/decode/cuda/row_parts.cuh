// Work on rows of many sequences: tiles of packed rows, and parts of a tile's keys where there are too few tiles. What parts
// come to lies in memory, and the last CTA of a tile adds it up.
#pragma once
#include "arrivals.cuh"
#include "row_tiles.cuh"
#include "warp_sums.cuh"

// O of each part, as if there were no other keys, and its log-sum-exp, in log2, tile by tile of one part. Tiles of more parts
// than one are a part each where these are as many as `target_parts`; as each is cut into one more at most, they are twice as
// many in all.
struct RowParts {
    float *o, *lse;
    unsigned *arrived;  // CTAs, for each tile, at its first part
};
FLASHLADDER_WORKSPACE(partial_o, float, "2 * target_parts * num_heads_k * block_m * head_dim");
FLASHLADDER_WORKSPACE(partial_lse, float, "2 * target_parts * num_heads_k * block_m");
FLASHLADDER_COUNTERS(arrived, "2 * target_parts * num_heads_k");

// The number of tiles is at most that of the whole ones, and one for each sequence, and for the rows behind the last one.
#define FLASHLADDER_ROW_TILES "packed_rows//block_m + batch + 1 + target_parts", "num_heads_k", "1"

struct RowWork {
    TilePlace at;
    int part, parts;  // of the tile's keys
    int slot;         // of the tile's first part, where there are several

    // Of blocks from `first` up to `end` those that the part has.
    __device__ int first_block(int first, int end, int next = 0) const {
        return first + static_cast<int>(static_cast<long long>(end - first) * (part + next) / parts);
    }
};

// All work, by a warp, whose lanes look at 32 sequences at a time; rows of none are one more, without keys. With target_parts,
// all keys of all tiles make so many parts. How many a tile has depends on all lengths then; without, it is one.
//
// Tiles of sequences that have several are bound by products, and others by the bytes of their keys. The two kinds take turns,
// as many of each as there are, so that SMs are busy with both. Of either the last rows come first: they see most keys.
template <int block_m, int block_n, class Params>
struct RowSchedule {
    const Params &params;
    int a_part = INT32_MAX;       // blocks
    int all = 0, of_several = 0;  // numbers of work, and those of sequences of several tiles among them

    // A `wave` of CTAs that each compute several parts, one by one: two short ones become one where that takes no longer.
    __device__ explicit RowSchedule(const Params &params_, int wave = 0) : params(params_) {
        long long blocks = 0, tiles = 0;
        Lane latest{Sequence{0, 0, 0}, 0, 0, 0};
#pragma unroll 2
        for (int first = 0; first <= params.batch; first += 32) {
            latest = sequence(first + lane_index());
            tiles += latest.tiles, blocks += static_cast<long long>(latest.tiles) * latest.blocks;
        }
        tiles = warp_sum(tiles), blocks = warp_sum(blocks);
        const int target = params.target_parts;
        // Sequences that overlap may be more tiles than the grid has room for.
        if (target > 0 && tiles <= static_cast<long long>(params.seqlen_q) * params.group() / block_m + params.batch + 1) {
            auto cut = [&](int most) {
                int blocks_each = static_cast<int>(min((blocks + most - 1) / most, static_cast<long long>(INT32_MAX - 1)));
                blocks_each = max(blocks_each, 1);
                // As each tile is cut into one more at most, these can be more: parts grow until they are not.
                if (params.batch < 32 && tiles <= most)
                    while (warp_sum(latest.numbers(blocks_each)) > most) blocks_each += 1 + blocks_each / 16;
                return blocks_each;
            };
            a_part = cut(target);
            if (const int turn = wave / params.num_heads_k; wave > 0 && params.batch < 32 && tiles <= turn)
                if (warp_sum(latest.numbers(a_part)) > turn)
                    if (const int longer = cut(turn); longer <= 2 * a_part) a_part = longer;
        }
        for (int first = 0; first <= params.batch; first += 32) {
            const Lane lane = sequence(first + lane_index());
            all += warp_sum(lane.numbers(a_part));
            of_several += warp_sum(lane.tiles > 1 ? lane.numbers(a_part) : 0);
        }
    }

    // The work with a number, from 0 on; behind the last one that of no rows.
    __device__ RowWork find(int number) const {
        if (number >= all) return {};
        const long long turn = number, several = turn * of_several / all;
        const bool is_several = (turn + 1) * of_several / all > several;
        const int wanted = static_cast<int>(is_several ? several : turn - several);  // among its kind
        int before = 0, slots_before = 0;
        for (int first = 0; first <= params.batch; first += 32) {
            const Lane lane = sequence(first + lane_index());
            const int parts = lane.parts(a_part), numbers = lane.tiles * parts;
            int end = lane.tiles > 1 == is_several ? numbers : 0, slots = parts > 1 ? numbers : 0;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(0xffffffff, end, step), other_slots = __shfl_up_sync(0xffffffff, slots, step);
                if (lane_index() >= step) end += other, slots += other_slots;
            }
            end += before, slots += slots_before;
            const int found = __popc(__ballot_sync(0xffffffff, end <= wanted));  // so many sequences end before
            if (found < 32) {
                auto of_found = [&](int x) { return __shfl_sync(0xffffffff, x, found); };
                const int its_parts = of_found(parts), its_tiles = of_found(lane.tiles);
                const int own = wanted - of_found(end) + its_tiles * its_parts, tile = own / its_parts;
                if (own < 0) return {};  // they overlap, and are too many to be counted
                return {{min(params.batch - first - found, params.batch - 1), its_tiles - 1 - tile, of_found(lane.rows.begin),
                         of_found(lane.rows.length), of_found(lane.keys)},
                        own % its_parts,
                        its_parts,
                        of_found(slots) - (its_tiles - tile) * its_parts};
            }
            before = __shfl_sync(0xffffffff, end, 31), slots_before = __shfl_sync(0xffffffff, slots, 31);
        }
        return {};
    }

  private:
    struct Lane {
        Sequence rows;
        int keys, tiles, blocks;

        __device__ int parts(int a_part) const { return blocks > a_part ? (blocks + a_part - 1) / a_part : 1; }
        __device__ int numbers(int a_part) const { return tiles * parts(a_part); }
    };

    // The sequence `i` before the last one; the rows of none are behind that.
    __device__ Lane sequence(int i) const {
        const int total = params.seqlen_q, b = params.batch - i;
        if (b < 0) return {Sequence{total, total, total}, 0, 0, 0};
        const int begin = params.cu_seqlens_q[b];
        const bool is_rest = b == params.batch;
        const Sequence rows{begin, is_rest ? total : params.cu_seqlens_q[b + 1], total};
        const int keys = is_rest ? 0 : params.keys_of(b);
        int first = 0;  // key that a row sees
        if constexpr (config::window) first = max(0, keys - rows.length - params.window_left);
        return {rows, keys, (rows.length * params.group() + block_m - 1) / block_m,
                (keys + block_n - 1) / block_n - first / block_n};
    }
};

// What a row comes to: 1 / l, with its sink, and its log-sum-exp in log2. A row that sees no key has 0 and -inf.
struct RowEnd {
    float share, lse;

    template <class Params>
    __device__ RowEnd(const Params &params, int head, float m, float l) : share(l > 0.0f ? 1.0f / l : 0.0f), lse(m + __log2f(l)) {
        if constexpr (config::sinks) {
            const auto sink = sink_of(params, head);
            share *= sink.share(lse);
            lse = sink.in_log(lse);
        }
    }
};

// O /= l of a warp's rows, with their sinks, and their log-sum-exps to memory.
template <class Params, class Tile, class Softmax, int cols>
__device__ inline void finish_rows(const Params &params, const Tile &tile, const Softmax &softmax, Accumulator<16, cols> &o) {
    each_row([&](int h) {
        const int i = h * 8 + accumulator_row();
        const RowEnd end{params, tile.head(i), softmax.m[0][h], quad_sum(softmax.l[0][h])};
        scale_row(o, h, end.share);
        if (params.lse != nullptr && lane_index() % 4 == 0 && tile.has(i)) params.lse[tile.in_lse(params, i)] = end.lse * ln_2;
    });
}

// The rows of one part of a tile in memory.
template <int block_m, int cols>
struct PartOfTile {
    long long first;  // row, of its tile's first part

    template <class Params>
    __device__ PartOfTile(const Params &params, const RowWork &work, int head_k)
        : first((static_cast<long long>(head_k) * 2 * params.target_parts + work.slot) * block_m) {}

    // A warp's rows, from row `at` of the tile on. `put_columns(h, row)` writes the lane's columns of its row h.
    template <class Softmax, class PutColumns>
    __device__ void put(const RowParts &parts, int part, int at, const Softmax &softmax, Accumulator<16, cols> &o,
                        PutColumns put_columns) const {
        each_row([&](int h) {
            const long long row = first + part * block_m + at + h * 8 + accumulator_row();
            const float sum = quad_sum(softmax.l[0][h]);
            scale_row(o, h, sum > 0.0f ? 1.0f / sum : 0.0f);
            if (lane_index() % 4 == 0) parts.lse[row] = softmax.m[0][h] + __log2f(sum);
            put_columns(h, parts.o + row * cols);
        });
    }

    // O of the tile's rows from all parts: added up in their order, whichever was ready first. An item is four columns of a
    // row. As each turn is a way to L2 and back, a thread loads 16 parts of items at once, or 8 where rows are wide: there
    // few registers are free.
    template <class Params, class Tile, class Has>
    __device__ void combine(const Params &params, const RowParts &parts, int count, const Tile &tile, int threads, Has has) const {
        constexpr int loads = cols <= 128 ? 16 : 8;
        if (count <= 4)
            combine_items<loads / 4, 4>(params, parts, count, tile, threads, has);
        else
            combine_items<loads / 8, 8>(params, parts, count, tile, threads, has);
    }

  private:
    template <int items, int at_once, class Params, class Tile, class Has>
    __device__ void combine_items(const Params &params, const RowParts &parts, int count, const Tile &tile, int threads,
                                  Has has) const {
        constexpr int chunks = cols / 4;
        const int end = (tile.last() + 1) * chunks;
        const float *lse_of_rows = parts.lse + first;
        const float4 *o_of_rows = reinterpret_cast<const float4 *>(parts.o + first * cols);
#pragma unroll 1
        for (int begin = threadIdx.x; begin < end; begin += items * threads) {
            Sum sums[items];
#pragma unroll 1
            for (int part = 0; part < count; part += at_once) {
                float lse[items][at_once];
                float4 o[items][at_once];
#pragma unroll
                for (int k = 0; k < items; ++k)
#pragma unroll
                    for (int p = 0; p < at_once; ++p) {
                        const int i = min(begin + k * threads, end - 1);
                        const bool is_part = part + p < count;
                        lse[k][p] = is_part ? lse_of_rows[(part + p) * block_m + i / chunks] : -INFINITY;
                        o[k][p] = is_part ? o_of_rows[(part + p) * block_m * chunks + i] : float4{};
                    }
#pragma unroll
                for (int k = 0; k < items; ++k) sums[k].add(lse[k], o[k]);
            }
#pragma unroll
            for (int k = 0; k < items; ++k) {
                const int i = begin + k * threads, row = i / chunks, col = i % chunks * 4;
                if (i >= end) break;
                const RowEnd row_end{params, tile.head(row), sums[k].m, sums[k].l};
                if (has(col))
                    store_rounded(tile.template element<config::dtype>(params.o, params.o_stride, row) + col,
                                  sums[k].scaled(row_end.share));
                if (params.lse != nullptr && col == 0) params.lse[tile.in_lse(params, row)] = row_end.lse * ln_2;
            }
        }
    }

    // Four columns of O of some parts, each part with a weight of 2^(its log-sum-exp - m), and the sum l of the weights.
    struct Sum {
        float m = -3.0e38f, l = 0.0f;
        float4 o = {};

        template <int count>
        __device__ void add(const float (&lse)[count], const float4 (&of_part)[count]) {
            float highest = m;
#pragma unroll
            for (int p = 0; p < count; ++p) highest = fmaxf(highest, lse[p]);
            add(exp2_approx(m - highest), {}, 0.0f);
#pragma unroll
            for (int p = 0; p < count; ++p) add(1.0f, of_part[p], exp2_approx(lse[p] - highest));
            m = highest;
        }
        __device__ void add(float factor, float4 x, float weight) {
            o.x = o.x * factor + x.x * weight, o.y = o.y * factor + x.y * weight;
            o.z = o.z * factor + x.z * weight, o.w = o.w * factor + x.w * weight;
            l = l * factor + weight;
        }
        __device__ float4 scaled(float factor) const {
            return make_float4(o.x * factor, o.y * factor, o.z * factor, o.w * factor);
        }
    };
};
