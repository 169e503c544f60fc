// A ring of blocks of the cache that a warpgroup fills itself: it reads rows wherever they lie, a block ahead of where it
// writes, widens what is in 8 bits, and writes 16-bit numbers as wgmma reads them.
//
// A row in 8 bits has 656 bytes: 512 e4m3, four fp32 scales, each of 128 of these, and the 64 columns that are K's alone in
// 16 bits. A warp reads 512 bytes at a time, a piece: a row's e4m3, or 64 columns of 16 bits of four rows.
#pragma once
#include "latents.cuh"
#include "pipeline/state.cuh"
#include "ptx/through_registers.cuh"
#include "ptx/sm89.cuh"
#include "ptx/sm90.cuh"

// Row indices[sequence][i] of all pages is key i of a sequence, which has up to seqlen_k. One that is none is not read.
struct ListedParams : SplitParams {
    const int *indices;
    int page_size, num_pages;
    FLASHLADDER_FURTHER_FIELDS(SplitParams, indices, page_size, num_pages)
};
using RowParams = std::conditional_t<config::sparse, ListedParams, CacheParams>;

// The place of a key. Where there is none, the page is -1.
__device__ inline KeyPlace place_of(const ListedParams &params, int sequence, int key, int end) {
    const unsigned rows = static_cast<unsigned>(params.num_pages) * params.page_size;
    const unsigned row = key < end ? params.indices[sequence * static_cast<long long>(params.seqlen_k) + key] : ~0u;
    if (row >= rows) return {-1, 0};
    const unsigned page = row / params.page_size;
    return {static_cast<int>(page), static_cast<int>(row - page * params.page_size)};
}
template <class Params>
__device__ inline KeyPlace place_of(const Params &params, int sequence, int key, int end) {
    return key < end ? KeyPlace::find(params, sequence, key, end) : KeyPlace{-1, 0};
}

constexpr int scales_at = 512, rotated_at = 528;  // bytes of a row in 8 bits

template <class Tile, class T, int stages>
struct alignas(1024) RowRing {
    using State = PipelineState<stages>;
    T block[stages][Tile::size];  // first: the hardware's swizzle wants multiples of 1024 bytes
    uint16_t there[stages][4];    // bits of the rows that are, of each warp that wrote
    Mbarrier full[stages];        // every warp has written its rows
    Mbarrier empty[stages];       // every warp of both groups is done with the block

    static __device__ State producer() { return {1}; }
    static __device__ State consumer() { return {0}; }

    // Before the other threads come.
    __device__ void init(int consumer_warps) {
        for (int i = 0; i < stages; ++i) {
            full[i].init(4);
            empty[i].init(consumer_warps);
        }
    }
    __device__ void wait(const State &at) { full[at.stage].wait(at.parity); }
    // Which rows of the block are there, from the lane's first column of S on.
    __device__ uint2 rows_there(const State &at) const {
        const uint2 bits = *reinterpret_cast<const uint2 *>(there[at.stage]);
        return {bits.x >> accumulator_col(), bits.y >> accumulator_col()};
    }
    __device__ void release(State &at) {  // the warp's lanes are together here
        empty[at.stage].arrive_as_warp();
        at.advance();
    }
};

// A warp's 16 rows of each block of a part.
template <bool in_8_bits, class Tile, class T>
struct RowReader {
    static constexpr int rows = 16, panels = Tile::panels;
    static constexpr int wide = in_8_bits ? rows : 0;                   // pieces that are widened
    static constexpr int pieces = wide + (in_8_bits ? 1 : panels) * 4;  // of the warp's rows
    static constexpr int ahead = 12;                                    // that are on their way, at most
    static constexpr int steps = (pieces + ahead - 1) / ahead * ahead;  // of a block: behind its pieces some do nothing
    static_assert(Tile::rows == 4 * rows, "each warp of the producer has a quarter of a block");

    // The lane's row of a block, null where there is none, and two of the scales of all.
    struct Places {
        const char *row;
        float scale[2];
    };

    int first_row = warp_index() % 4 * rows, lane = lane_index();
    uint4 piece[ahead];

    // Lane l has row l % 16.
    template <class Part>
    __device__ Places find(const Part &part, int first) const {
        constexpr int bytes = in_8_bits ? 1 : sizeof(T);
        const int key = first + first_row + lane % rows;
        const KeyPlace place = place_of(part.params, part.tile.batch, key, part.end);
        const TensorStride at = part.params.k_cache_stride;
        const long long element = place.page * at.batch + place.row * at.row + part.tile.head_k * at.head;
        const char *cache = static_cast<const char *>(part.params.k_cache);
        return {place.page >= 0 ? cache + element * bytes : nullptr};
    }
    // Scale l % 4 of rows l / 4 and l / 4 + 8.
    __device__ void load_scales(Places &places) const {
        if constexpr (in_8_bits)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const char *row = row_of(places, i * 8 + lane / 4);
                places.scale[i] = row ? *reinterpret_cast<const float *>(row + scales_at + lane % 4 * 4) : 0.0f;
            }
    }
    __device__ void load(const Places &places, int number) {
        const int from = number - wide;  // of the pieces in 16 bits: 64 columns of four rows
        const bool widens = number < wide;
        const char *row = row_of(places, widens ? widened_row(number) : from % 4 * 4 + lane / 8);
        const int byte = widens ? lane * 16 : from / 4 * 128 + lane % 8 * 16 + (in_8_bits ? rotated_at : 0);
        const bool has = row && (in_8_bits || byte < Tile::cols * int(sizeof(T)));
        piece[number % ahead] = load_global_16_or_zeros(row + byte, has);
    }
    __device__ void store(const Places &places, int number, uint32_t block) const {
        const uint4 found = piece[number % ahead];
        if (number < wide) {
            const int row = widened_row(number);
            const float scale = __shfl_sync(0xffffffff, places.scale[row / 8], row % 8 * 4 + lane / 8);
            const int odd = lane / 4 % 2;  // two neighbouring panels: other banks first
            const uint2 low{found.x, found.y}, high{found.z, found.w};
            put(block, first_row + row, lane * 16 + odd * 8, widened(odd ? high : low, scale));
            put(block, first_row + row, lane * 16 + 8 - odd * 8, widened(odd ? low : high, scale));
        } else {
            const int from = number - wide, panel = in_8_bits ? panels - 1 : from / 4;
            put(block, first_row + from % 4 * 4 + lane / 8, panel * 64 + lane % 8 * 8, found);
        }
    }

    // Fills blocks of the ring with all of a part.
    template <class Part, class Ring>
    __device__ void read_all(const Part &part, Ring &ring) {
        constexpr int block_n = Tile::rows;
        auto at = ring.producer();
        Places here = find(part, part.begin);
        load_scales(here);
#pragma unroll
        for (int i = 0; i < ahead; ++i) load(here, i);
        for (int first = part.begin; first < part.end; first += block_n) {
            Places next = find(part, first + block_n);
            ring.empty[at.stage].wait(at.parity);
            keep_in_place(lane);
            const uint32_t block = shared_address(ring.block[at.stage]);
            const unsigned there = __ballot_sync(0xffffffff, here.row != nullptr);
            if (lane == 0) ring.there[at.stage][first_row / rows] = there;
#pragma unroll
            for (int i = 0; i < steps; ++i) {
                if (i < pieces) store(here, i, block);
                const int later = (i + ahead) % steps;
                if (later == 0) load_scales(next);
                if (later < pieces) load(later > i ? here : next, later);
            }
            fence_proxy_async();  // before wgmma reads the rows
            __syncwarp();         // every lane has written
            ring.full[at.stage].arrive_as_warp();
            at.advance();
            here = next;
        }
    }

  private:
    // Of a piece: rows that are 8 apart follow each other, as their swizzle is the same.
    __device__ static constexpr int widened_row(int number) { return number / 2 + number % 2 * 8; }
    __device__ static const char *row_of(const Places &places, int row) {
        return reinterpret_cast<const char *>(__shfl_sync(0xffffffff, reinterpret_cast<long long>(places.row), row));
    }
    __device__ static void put(uint32_t block, int row, int col, uint4 eight) {
        store_shared_16(block + Tile::offset(row, col) * sizeof(T), eight);
    }
    // Eight e4m3, each times the scale, rounded once.
    __device__ static uint4 widened(uint2 eight, float scale) {
        auto two = [&](uint32_t of, int half) {
            const uint32_t bits = e4m3x2_to_f16x2(of, half);
            const float2 values = __half22float2(reinterpret_cast<const __half2 &>(bits));
            return pack<T>(values.x * scale, values.y * scale);
        };
        return {two(eight.x, 0), two(eight.x, 1), two(eight.y, 0), two(eight.y, 1)};
    }
};
