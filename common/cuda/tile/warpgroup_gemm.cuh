// A warpgroup's share of a product of tiles: 64 rows. It reads its operands from shared memory by itself, 16 of k at a
// time. Tiles are SwizzledPanels: rows of 128, 64 or 32 bytes whose chunks are permuted over 8 rows, which is the hardware's
// swizzle of as many bytes if a tile begins at a multiple of 1024 bytes.
#pragma once
#include "ptx/sm90.cuh"
#include "ptx/wgmma.cuh"
#include "tile/gemm.cuh"

constexpr int warpgroup_threads = 128;
constexpr int warpgroup_rows = 64;

__device__ inline int warpgroup_index() { return threadIdx.x / warpgroup_threads; }

// PTX ISA, "Matrix Descriptor Format". Addresses and steps are in units of 16 bytes. `panel_bytes` leads from one panel to
// the next of an operand whose columns run along m or n; from 8 rows to the next 8 lead 8 rows of a panel. The address has 18
// bits: in a cluster, `without_rank` gives it.
template <class Tile>
__device__ inline uint64_t matrix_descriptor(const void *tile, int panel_bytes) {
    constexpr int row_bytes = Tile::row_pitch * 2;
    static_assert(row_bytes == 128 || row_bytes == 64 || row_bytes == 32, "rows of a panel are as wide as a swizzle");
    constexpr uint64_t swizzle = row_bytes == 32 ? 3 : 128 / row_bytes;
    const uint64_t start = shared_address(tile) >> 4;
    return start | static_cast<uint64_t>(panel_bytes >> 4) << 16 | static_cast<uint64_t>(row_bytes * 8 >> 4) << 32 |
           swizzle << 62;
}

// An operand in shared memory whose rows run along m or n: Q and K of Q K^T. `at` gives its 16 columns of a step.
template <class Tile>
struct ByRows {
    static constexpr bool by_columns = false;
    uint64_t first;

    // Rows of a tile from those of this warp's group on.
    template <class T>
    __device__ void start(const T *tile, int warp_row = 0) {
        first = matrix_descriptor<Tile>(tile + Tile::step(warp_row / warpgroup_rows * warpgroup_rows, 0), 16);
    }
    __device__ uint64_t at(int step) const {
        constexpr int steps = Tile::row_pitch / 16;  // of a panel
        return first + (Tile::step(0, step / steps * Tile::row_pitch) * 2 + step % steps * 32 >> 4);
    }
    __device__ ByRows after(int tiles) const { return {first + tiles * (Tile::size * 2 >> 4)}; }
    __device__ ByRows below(int rows) const { return {first + (Tile::step(rows, 0) * 2 >> 4)}; }
    __device__ ByRows right(int cols) const { return {first + (Tile::step(0, cols) * 2 >> 4)}; }
};

// An operand in shared memory whose rows run along k: V of P V. `at` gives its 16 rows of a step, from the first
// column of a panel on.
template <class Tile>
struct ByColumns {
    static constexpr bool by_columns = true;
    uint64_t first;

    template <class T>
    __device__ void start(const T *tile, int first_col = 0) {
        first = matrix_descriptor<Tile>(tile + Tile::step(0, first_col), Tile::rows * Tile::row_pitch * 2);
    }
    __device__ uint64_t at(int step) const { return first + (Tile::step(step * 16, 0) * 2 >> 4); }
    __device__ ByColumns after(int tiles) const { return {first + tiles * (Tile::size * 2 >> 4)}; }
    __device__ ByColumns below(int rows) const { return {first + (Tile::step(rows, 0) * 2 >> 4)}; }
    __device__ ByColumns right(int cols) const { return {first + (Tile::step(0, cols) * 2 >> 4)}; }
};

template <int rows, int cols>
__device__ inline void stay_here(Accumulator<rows, cols> &c) {
#pragma unroll
    for (int n = 0; n < cols / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) stay_here(c.block[0][n][i]);
}

template <int k>
__device__ inline void stay_here(HeldA<16, k> &a) {
#pragma unroll
    for (int step = 0; step < k / 16; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) stay_here(a.block[step][0][i]);
}

// Starts C = A B, or C += A B, both in shared memory, as a group of its own. C may not be touched before `wait_for`.
template <class T, int k, int cols, template <class> class A, class Tile, class B>
__device__ inline void start_product(Accumulator<16, cols> &c, const A<Tile> &a, const B &b, bool adds = false) {
    stay_here(c);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < k / 16; ++step)
        Wgmma<T, cols>::template of_shared<A<Tile>::by_columns, B::by_columns>(c.block[0], a.at(step), b.at(step),
                                                                               adds || step > 0);
    wgmma_commit();
}

// The same with A in registers, and C += A B. Neither may be touched before `wait_for`.
template <class T, int k, int cols, class B>
__device__ inline void start_product(Accumulator<16, cols> &c, const HeldA<16, k> &a, const B &b, bool adds = false) {
    stay_here(c);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < k / 16; ++step)
        Wgmma<T, cols>::template of_registers<B::by_columns>(c.block[0], a.block[step][0], b.at(step), adds || step > 0);
    wgmma_commit();
}
template <class T, int k, int cols, class B>
__device__ inline void start_sum(Accumulator<16, cols> &c, const HeldA<16, k> &a, const B &b) {
    start_product<T>(c, a, b, true);
}

// Waits until at most `pending` groups of products are under way; C is not one of theirs.
template <int pending = 0, int cols>
__device__ inline void wait_for(Accumulator<16, cols> &c) {
    wgmma_wait<pending>();
    stay_here(c);
}

// The same where A, of a sum, is in registers: they are free again.
template <int cols, int k>
__device__ inline void wait_for(Accumulator<16, cols> &c, HeldA<16, k> &a) {
    wgmma_wait<0>();
    stay_here(c);
    stay_here(a);
}

// P for k keys of P for fewer: those that are added weigh nothing.
template <int k, int fewer>
__device__ inline HeldA<16, k> widen(const HeldA<16, fewer> &p) {
    HeldA<16, k> wide;
#pragma unroll
    for (int step = 0; step < k / 16; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) wide.block[step][0][i] = step < fewer / 16 ? p.block[step][0][i] : 0;
    return wide;
}

// S = Q K^T of one warp alone, by mma: no other warp takes part. Q is held, or an operand that is streamed.
template <class KVTile, class T, int cols, class Q>
__device__ inline void scores_of_warp(Accumulator<16, cols> &s, Q &q, const T *k_tile, const T *, int) {
    KOperand<cols, KVTile::cols, 2, HoistedReader<KVTile, T, ByRow>> k;
    k.reader.start(k_tile);
    s.clear();
    gemm<T, KVTile::cols>(s, q, k);
    fence_proxy_async();  // this warp has read before TMA writes again
}

// The same of Q in shared memory, where the warp's rows begin at `first_row`.
template <class KVTile, class T, int cols, class QTile>
__device__ inline void scores_of_warp(Accumulator<16, cols> &s, ByRows<QTile> &, const T *k_tile, const T *q_tile,
                                      int first_row) {
    QOperand<16, QTile::cols, 2, HoistedReader<QTile, T>> q;
    q.start(q_tile, first_row);
    scores_of_warp<KVTile>(s, q, k_tile, q_tile, first_row);
}
