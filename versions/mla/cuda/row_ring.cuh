// A ring of blocks of the cache that warps fill themselves, each with 16 rows of a block.
#pragma once
#include "cache_rows.cuh"
#include "pipeline/state.cuh"
#include "ptx/sm90.cuh"

template <class Tile, class T, int stages_>
struct alignas(1024) RowRing {
    static constexpr int stages = stages_;
    static constexpr int warps = Tile::rows / warp_rows;  // that fill a block
    using State = PipelineState<stages>;
    T block[stages][Tile::size];    // first: the hardware's swizzle wants multiples of 1024 bytes
    uint16_t there[stages][warps];  // bits of the rows that are, of each warp that wrote
    Mbarrier full[stages];          // every warp has written its rows
    Mbarrier empty[stages];         // every warp of both groups is done with the block

    static __device__ State producer() { return {1}; }
    static __device__ State consumer() { return {0}; }

    // Before the other threads come.
    __device__ void init(int consumer_warps) {
        for (int i = 0; i < stages; ++i) {
            full[i].init(warps);
            empty[i].init(consumer_warps);
        }
    }
    __device__ void wait(const State &at) { full[at.stage].wait(at.parity); }
    // Which rows of the block are there, from the lane's first column of S on.
    __device__ uint2 rows_there(const State &at) const {
        static_assert(warps == 4, "64 bits");
        const uint2 bits = *reinterpret_cast<const uint2 *>(there[at.stage]);
        return {bits.x >> accumulator_col(), bits.y >> accumulator_col()};
    }
    __device__ void release(State &at) {  // the warp's lanes are together here
        empty[at.stage].arrive_as_warp();
        at.advance();
    }
};

// Hides the keys that are not there, whose bits are 0: -inf in S.
template <int keys>
__device__ inline void hide_rows(Accumulator<16, keys> &s, uint2 there) {
#pragma unroll
    for (int n = 0; n < keys / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (!((n < 4 ? there.x : there.y) >> (n % 4 * 8 + i % 2) & 1)) s.block[0][n][i] = -INFINITY;
}
