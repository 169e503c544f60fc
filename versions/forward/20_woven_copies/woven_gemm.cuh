// Products of tiles, with other work woven in between their mmas.
#pragma once
#include "tile/gemm.cuh"

// The B operand of a product, as a ring of 16 x 16 blocks: K, or V, which is transposed on its way. Blocks are counted
// along n, and then along k. Block t is loaded `ahead` blocks before its mmas.
template <int n, int k, int ahead, bool transposed, class Reader>
struct FragmentRing {
    static constexpr int per_step = n / 16;  // blocks of one k-step
    static constexpr int count = per_step * (k / 16);
    static constexpr int slots = ahead + 1;
    Reader reader;
    uint32_t block[slots][4];

    // Loads the first blocks.
    __device__ void fetch() {
#pragma unroll
        for (int t = 0; t < ahead; ++t) load(t);
    }
    // To be called when the mmas of block t begin.
    __device__ void advance(int t) {
        if (t + ahead < count) load(t + ahead);
    }
    // The 16 x 8 operand for the columns from 8 * n8 on of block t; of its two halves along k, number `half`.
    __device__ uint32_t at(int t, int n8, int half) const {
        using Lanes = typename Reader::Lanes;
        return block[t % slots][transposed ? Lanes::block(half, n8) : Lanes::block(n8, half)];
    }

  private:
    __device__ void load(int t) {
        const int n_ = t % per_step * 16, k_ = t / per_step * 16;
        if (transposed)
            ldmatrix_x4_trans(block[t % slots], reader.address(k_, n_));
        else
            ldmatrix_x4(block[t % slots], reader.address(n_, k_));
    }
};

// C += A B, block after block of B. After the mmas of block t it calls weave(t). The caller has fetched the first
// fragments of A and B. Further fragments of A are fetched here, half a k-step ahead.
template <class T, int rows, int cols, class A, int k, int ahead, bool transposed, class Reader, class Weave>
__device__ inline void woven_gemm(Accumulator<rows, cols> &c, A &a, FragmentRing<cols, k, ahead, transposed, Reader> &b,
                                  Weave weave) {
    constexpr int per_step = cols / 16;
#pragma unroll
    for (int t = 0; t < b.count; ++t) {
        const int step = t / per_step, n = t % per_step;
        b.advance(t);
        if (n == per_step / 2 && step + 1 < k / 16) a.fetch(step + 1);
        Serpentine::visit<rows / 16, 2>([&](int m, int n8) {
            mma_m16n8k16<T>(c.block[m][2 * n + n8], a.at(step, m), b.at(t, n8, 0), b.at(t, n8, 1));
        });
        weave(t);
    }
}

// A ring of `count` tiles in shared memory. One is read while the next one is filled.
template <int count, int tile_bytes>
struct TileRing {
    int tile = 0;  // the one that is read

    // Bytes from this tile to the next.
    __device__ int to_next() const { return tile + 1 < count ? tile_bytes : (1 - count) * tile_bytes; }

    // Moves both addresses on by one tile: `reader` is in the tile that is read, `writer` in the one that is filled.
    __device__ void turn(uint32_t &reader, uint32_t &writer) {
        reader += to_next();
        tile = tile + 1 < count ? tile + 1 : 0;
        writer += to_next();
    }
};
