// Warps fill the ring by asynchronous copies. Rows in 16 bits come to where wgmma reads them. Those in 8 bits come to the
// same places, and are widened there.
#pragma once
#include "ptx/through_registers.cuh"
#include "row_ring.cuh"

// Of a row in 8 bits a lane copies 16 e4m3 to where the first 8 of them will be as 16-bit numbers. Nobody else uses the 32
// bytes of all 16 until the block is full, so lanes need not wait for each other.
//
//     chunks of 16 bytes of a row:    0           1           2           3          ...
//     as they come:                   e4m3 0..15              e4m3 16..31            ...
//     widened:                        0 .. 7      8 .. 15     16 .. 23    24 .. 31   ...
//
// Every other chunk is used at a time. So four lanes have 64 columns of a row, and the next four those of the next row,
// whose swizzle differs in the lowest bit: together they use all banks.
//
// Each of `producers` warpgroups fills every `producers`-th block of a part, and each of its warps 16 rows of it.
template <bool in_8_bits, bool prefetch, int producers, class Tile, class T>
struct RowCopier {
    static constexpr int kept = in_8_bits ? Tile::panels - 1 : 0;        // the first panel that comes in 16 bits
    static constexpr int pieces = in_8_bits ? warp_rows : 0, cols = 256;  // that a warp widens, of two rows each
    static constexpr int row_bytes = in_8_bits ? rotated_at + 128 : Tile::cols * int(sizeof(T));
    static_assert(Tile::rows == 4 * warp_rows, "each warp of a producer has a quarter of a block");

    int lane = lane_index(), first_row = warp_index() % 4 * warp_rows;

    // Fills the blocks of a part that are the group's. Copies of the next blocks are on their way where the ring has room.
    template <class Part, class Ring>
    __device__ void fill(const Part &part, Ring &ring, int group) {
        // With six stages groups have two blocks at a time: no copy may wait for one of them before the other has come.
        constexpr int ahead = (Ring::stages - 2) / producers / 2, stride = producers * Tile::rows;
        auto to = ring.producer();
        for (int i = 0; i < group; ++i) to.advance();
        auto at = to;
        int first = part.begin + group * Tile::rows, coming = first;
        WarpRows rows = find(part, coming);
        WarpScales scales[ahead + 1] = {};

        auto start = [&](WarpScales &of_block) {
            if (coming < part.end) {
                ring.empty[to.stage].wait(to.parity);
                keep_in_place(lane);
                copy(rows, shared_address(ring.block[to.stage]));
                if constexpr (in_8_bits) of_block.load(rows, lane);
                const uint16_t there = rows.there();
                if (lane == 0) ring.there[to.stage][first_row / warp_rows] = there;
                next(to);
                coming += stride;
                rows = find(part, coming);
                if (prefetch && lane < warp_rows && rows.row != nullptr) bulk_prefetch(rows.row, row_bytes);
            }
            cp_async_commit();  // a group a block, also an empty one, so that they can be counted
        };
#pragma unroll
        for (int i = 0; i < ahead; ++i) start(scales[i]);
        for (; first < part.end; first += stride) {
            start(scales[ahead]);
            cp_async_wait<ahead>();
            keep_in_place(lane);  // registers are few: what follows from it is worked out for each block
            widen(scales[0], shared_address(ring.block[at.stage]));
            fence_proxy_async();  // before wgmma reads the rows
            __syncwarp();         // every lane has written
            ring.full[at.stage].arrive_as_warp();
            next(at);
#pragma unroll
            for (int i = 0; i < ahead; ++i) scales[i] = scales[i + 1];
        }
    }

  private:
    template <class Part>
    __device__ WarpRows find(const Part &part, int first) const {
        return WarpRows::find<in_8_bits ? 1 : sizeof(T)>(part, first + first_row, lane);
    }
    template <class State>
    __device__ static void next(State &at) {
#pragma unroll
        for (int i = 0; i < producers; ++i) at.advance();
    }

    // Starts copying the warp's rows of a block.
    __device__ void copy(const WarpRows &rows, uint32_t block) const {
        const uint32_t widened_at = block + own_place(), kept_at = block + place(lane / 8, lane % 8 * 8);
#pragma unroll
        for (int piece = 0; piece < pieces; piece += 2) {
            const char *row = rows.of(row_of_piece(piece) + lane / 4 % 2);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                cp_async_16_or_zeros(moved(widened_at, row_of_piece(piece), 0, half * cols),
                                     row + half * cols + lane / 8 * 64 + lane % 4 * 16, row != nullptr);
        }
#pragma unroll
        for (int r = 0; r < warp_rows; r += 4) {
            const char *row = rows.of(r + lane / 8);
#pragma unroll
            for (int panel = kept; panel < Tile::panels; ++panel) {
                const int byte = (panel - kept) * 128 + lane % 8 * 16;
                const bool has = row && (in_8_bits || byte < row_bytes);
                cp_async_16_or_zeros(moved(kept_at, r, 0, panel * 64), row + byte + (in_8_bits ? rotated_at : 0), has);
            }
        }
    }

    // Widens what the lane has copied. What it does next is loaded meanwhile.
    __device__ void widen(const WarpScales &scales, uint32_t block) const {
        if constexpr (in_8_bits) {
            const uint32_t from = block + own_place();
            auto load = [&](int piece) { return load_shared_16(moved(from, row_of_piece(piece), 0, piece % 2 * cols)); };
            uint4 found[2] = {load(0)};
#pragma unroll
            for (int piece = 0; piece < pieces; ++piece) {
                const uint4 sixteen = found[piece % 2];
                if (piece + 1 < pieces) found[(piece + 1) % 2] = load(piece + 1);
                const int row = row_of_piece(piece), col = piece % 2 * cols;
                const float scale = scales.of(row / 8, row % 8 + lane / 4 % 2, col / 128 + lane / 16);
                store_shared_16(moved(from, row, 0, col), widened<T>(uint2{sixteen.x, sixteen.y}, scale));
                store_shared_16(moved(from, row, 1, col), widened<T>(uint2{sixteen.z, sixteen.w}, scale));
            }
        }
    }

    // The even one of a piece's two rows. Rows that are 8 apart follow each other, as their swizzle is the same.
    __device__ static constexpr int row_of_piece(int piece) { return piece / 4 * 2 + piece / 2 % 2 * 8; }
    // In bytes from a block's start: of the warp's rows, and of the lane's 16 columns of the first piece.
    __device__ uint32_t place(int row, int col) const { return Tile::offset(first_row + row, col) * sizeof(T); }
    __device__ uint32_t own_place() const { return place(lane / 4 % 2, lane / 8 * 64 + lane % 4 * 16); }
    // The address `row` rows, `chunk` chunks and `col` columns on from one in an even chunk. Rows are so many that they only
    // add bits to that of `address`; columns are whole panels. A block lies at a multiple of 1024.
    __device__ static uint32_t moved(uint32_t address, int row, int chunk, int col) {
        return (address ^ (row % 8 ^ chunk) * 16) + Tile::step(row, col) * sizeof(T);
    }
};
