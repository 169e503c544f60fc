// A ring of blocks of rows in 8 bits, as they lie in the cache, and what products take from it.
//
// Rows are 656 bytes apart, an odd multiple of 16: the same 16 bytes of 8 rows lie in all banks, and ldmatrix reads 8 x 16
// e4m3 in one wavefront, as if they were 8 x 8 numbers of 16 bits. Without a swizzle a row is one bulk copy.
#pragma once
#include "cache_rows.cuh"
#include "pipeline/state.cuh"
#include "ptx/sm90.cuh"
#include "ptx/through_registers.cuh"

constexpr int row_bytes = rotated_at + 128;
static_assert(row_bytes / 16 % 2 == 1, "rows begin in other banks");

template <int rows, int stages_>
struct alignas(128) RawRing {
    static constexpr int stages = stages_, warps = rows / warp_rows;  // that fill a block
    static_assert(warps == 4, "64 bits say which rows are there");
    using State = PipelineState<stages>;
    char block[stages][rows * row_bytes];
    uint16_t there[stages][warps];  // bits of the rows that are, of each warp that copies
    Mbarrier full[stages];          // all of them have come
    Mbarrier empty[stages];         // the warps that had the block are done with it

    static __device__ State producer() { return {1}; }
    static __device__ State consumer() { return {0}; }

    // Before the other threads come, and `fence_mbarrier_init` after it.
    __device__ void init(int consumer_warps) {
        for (int i = 0; i < stages; ++i) {
            full[i].init(warps);
            empty[i].init(consumer_warps);
        }
    }

    // Copies the warp's rows of all blocks of a part.
    template <class Part>
    __device__ void fill(const Part &part, int warp) {
        auto to = producer();
        int lane = lane_index();
        auto find = [&](int first) { return WarpRows::find<1>(part, first + warp * warp_rows, lane); };
        WarpRows found = find(part.begin);
        for (int first = part.begin; first < part.end; first += rows) {
            empty[to.stage].wait(to.parity);
            load(to.stage, warp, found, lane);
            keep_in_place(lane);  // registers are few: what follows from it is worked out for each block
            found = find(first + rows);
            to.advance();
        }
    }
    // The warp is done with a block. Copies may come where its ordinary code has read.
    __device__ void release(const State &at) {
        fence_proxy_async();  // before copies come where it read
        __syncwarp();         // every lane has read
        empty[at.stage].arrive_as_warp();
    }

    // Bit 0: the row is there, and so on.
    __device__ unsigned rows_there(int stage, int row) const {
        return reinterpret_cast<const uint32_t *>(there[stage])[row / 32] >> row % 32;
    }
    // The float that scales columns 128 * group and the next 127 of a row.
    __device__ const float &scale(int stage, int row, int group) const {
        return reinterpret_cast<const float *>(block[stage] + row * row_bytes + scales_at)[group];
    }

  private:
    // Starts copying a warp's rows. Those that follow each other in the cache, as those of a page do, are one copy. Bytes may
    // come before they are expected: the phase also waits for that arrival.
    __device__ void load(int stage, int warp, const WarpRows &found, int lane) {
        char *to = block[stage] + warp * warp_rows * row_bytes;
        const unsigned all = (1 << warp_rows) - 1, is = found.there() & all;
        const bool follows = found.row == found.of(lane - 1) + row_bytes && lane % warp_rows > 0;
        const bool begins = found.row != nullptr && !follows;
        const unsigned begin = __ballot_sync(0xffffffff, begins);
        if (lane < warp_rows && begins) {
            const int count = __clz(__brev((begin | ~is) >> lane >> 1)) + 1;  // to where others begin, or none is there
            bulk_load(to + lane * row_bytes, found.row, count * row_bytes, full[stage]);
        }
        if (is != all) {
            clear(to, all & ~is);
            fence_proxy_async();  // before copies come where zeros are
            __syncwarp();         // zeros are there
        }
        if (lane == 0) {
            there[stage][warp] = is;
            full[stage].arrive_expecting(__popc(is) * row_bytes);
        }
    }
    // Zeros take the place of rows that are not there: P is 0 there, and 0 * V must be 0. Who reads them says that copies may
    // come there again.
    __device__ static void clear(char *first, unsigned missing) {
        for (; missing; missing >>= 1, first += row_bytes) {
            if (!(missing & 1)) continue;
            for (int byte = lane_index() * 16; byte < row_bytes; byte += 512)
                store_shared_16(shared_address(first) + byte, uint4{});
        }
    }
};

// An A operand of 16 x 16 from e4m3 of rows r and r + 8, four columns each. Every e4m3 is an f16, NaN too.
struct WidenedA {
    uint32_t block[4];
    __device__ WidenedA(uint32_t upper, uint32_t lower)
        : block{e4m3x2_to_f16x2(upper, 0), e4m3x2_to_f16x2(lower, 0), e4m3x2_to_f16x2(upper, 1), e4m3x2_to_f16x2(lower, 1)} {}
};

// The same of the transposed matrix, from e4m3 of two columns of row r, then of row r + 1; and of r + 8 and r + 9.
struct TransposedA {
    uint32_t block[4];
    __device__ TransposedA(uint32_t upper, uint32_t lower) {
        const uint32_t rows[2] = {__byte_perm(upper, 0, 0x3120), __byte_perm(lower, 0, 0x3120)};  // a column's side by side
#pragma unroll
        for (int i = 0; i < 4; ++i) block[i] = e4m3x2_to_f16x2(rows[i / 2], i % 2);
    }
};
