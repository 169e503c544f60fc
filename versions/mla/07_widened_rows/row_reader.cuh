// A warpgroup fills the ring: it reads rows a block ahead of where it writes, widens what is in 8 bits, and writes 16-bit
// numbers as wgmma reads them. A warp reads 512 bytes at a time, a piece: a row's e4m3, or 64 columns of 16 bits of four rows.
#pragma once
#include "ptx/through_registers.cuh"
#include "row_ring.cuh"

// A warp's 16 rows of each block of a part.
template <bool in_8_bits, class Tile, class T>
struct RowReader {
    static constexpr int rows = warp_rows, panels = Tile::panels;
    static constexpr int wide = in_8_bits ? rows : 0;                   // pieces that are widened
    static constexpr int pieces = wide + (in_8_bits ? 1 : panels) * 4;  // of the warp's rows
    static constexpr int ahead = 12;                                    // that are on their way, at most
    static constexpr int steps = (pieces + ahead - 1) / ahead * ahead;  // of a block: behind its pieces some do nothing
    static_assert(Tile::rows == 4 * rows, "each warp of the producer has a quarter of a block");

    struct Places {
        WarpRows rows;
        WarpScales scales;
    };

    int first_row = warp_index() % 4 * rows, lane = lane_index();
    uint4 piece[ahead];

    template <class Part>
    __device__ Places find(const Part &part, int first) const {
        return {WarpRows::find<in_8_bits ? 1 : sizeof(T)>(part, first + first_row, lane)};
    }
    __device__ void load_scales(Places &places) const {
        if constexpr (in_8_bits) places.scales.load(places.rows, lane);
    }
    __device__ void load(const Places &places, int number) {
        const int from = number - wide;  // of the pieces in 16 bits: 64 columns of four rows
        const bool widens = number < wide;
        const char *row = places.rows.of(widens ? widened_row(number) : from % 4 * 4 + lane / 8);
        const int byte = widens ? lane * 16 : from / 4 * 128 + lane % 8 * 16 + (in_8_bits ? rotated_at : 0);
        const bool has = row && (in_8_bits || byte < Tile::cols * int(sizeof(T)));
        piece[number % ahead] = load_global_16_or_zeros(row + byte, has);
    }
    __device__ void store(const Places &places, int number, uint32_t block) const {
        const uint4 found = piece[number % ahead];
        if (number < wide) {
            const int row = widened_row(number);
            const float scale = places.scales.of(row / 8, row % 8, lane / 8);
            const int odd = lane / 4 % 2;  // two neighbouring panels: other banks first
            const uint2 low{found.x, found.y}, high{found.z, found.w};
            put(block, first_row + row, lane * 16 + odd * 8, widened<T>(odd ? high : low, scale));
            put(block, first_row + row, lane * 16 + 8 - odd * 8, widened<T>(odd ? low : high, scale));
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
            const uint16_t there = here.rows.there();
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
    __device__ static void put(uint32_t block, int row, int col, uint4 eight) {
        store_shared_16(block + Tile::offset(row, col) * sizeof(T), eight);
    }
};
