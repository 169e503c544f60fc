// A team's ring of blocks of rows in 8 bits, as they lie in the cache, and what products take from it.
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

template <int rows, int warps, int stages_>
struct alignas(128) RawRing {
    static constexpr int stages = stages_, of_warp = rows / warps;  // rows that a warp copies
    static_assert(of_warp == 8 && warps == 8, "a byte says which of a warp's rows are there, 64 bits which of all");
    using State = PipelineState<stages>;
    char block[stages][rows * row_bytes];
    uint8_t there[stages][warps];  // bits of the rows that are
    Mbarrier full[stages];         // all of them have come

    // Before the other threads come, and `fence_mbarrier_init` after it.
    __device__ void init() {
        for (Mbarrier &each : full) each.init(warps);
    }

    // The warp's rows of the block of keys `first` and the next of a part.
    template <class Part>
    __device__ static WarpRows find(const Part &part, int first, int warp) {
        return WarpRows::find<1, of_warp>(part, first + warp * of_warp, lane_index());
    }
    // Starts copying them to a stage that the team is done with. Rows that follow each other in the cache, as those of a page
    // do, are one copy. Bytes may come before they are expected: the phase also waits for that arrival.
    __device__ void load(int stage, int warp, const WarpRows &found) {
        char *to = block[stage] + warp * of_warp * row_bytes;
        const unsigned all = (1 << of_warp) - 1, is = found.there() & all;
        const int lane = lane_index();
        const bool follows = found.row == found.of(lane - 1) + row_bytes && lane % of_warp > 0;
        const unsigned begin = __ballot_sync(0xffffffff, found.row != nullptr && !follows);
        if (lane < of_warp && begin >> lane & 1) {
            const int count = __clz(__brev((begin | ~is) >> lane >> 1)) + 1;  // to where others begin, or none is there
            bulk_load(to + lane * row_bytes, found.row, count * row_bytes, full[stage]);
        }
        if (is != all) {
            clear(to, all & ~is);
            __syncwarp();  // zeros are there
        }
        if (lane == 0) {
            there[stage][warp] = is;
            full[stage].arrive_expecting(__popc(is) * row_bytes);
        }
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
