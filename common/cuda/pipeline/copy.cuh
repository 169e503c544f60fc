// Global memory -> shared memory, by cp.async.
#pragma once
#include "ptx/sm80.cuh"
#include "tile/layout.cuh"

// Starts copying a tile from global to shared memory, 16 bytes a lane. Each warp takes a band of consecutive rows.
template <class Tile, int num_warps, class T>
__device__ inline void copy_tile_by_warps(T *shared, const T *global, long long row_stride) {
    constexpr int chunk = 16 / sizeof(T);
    constexpr int lanes_per_row = Tile::cols / chunk;
    constexpr int rows_per_step = 32 / lanes_per_row;
    constexpr int rows_per_warp = Tile::rows / num_warps;
    static_assert(rows_per_warp % rows_per_step == 0, "a warp copies whole steps");

    const int col = lane_index() % lanes_per_row * chunk;
    const int row = warp_index() * rows_per_warp + lane_index() / lanes_per_row;
    const T *from = global + row * row_stride + col;
#pragma unroll
    for (int step = 0; step < rows_per_warp; step += rows_per_step)
        cp_async_16(shared_address(shared + Tile::offset(row + step, col)), from + step * row_stride);
}

// The same, with the rows given to the whole CTA in turn. A thread's rows are then a multiple of 8 apart, so all have
// the same swizzle: one address in shared memory, and constants from there. `start` works out the thread's addresses.
// `copy` copies tile number `block`, counted from the address that `start` got, to `shift` bytes behind its place.
template <class Tile, int num_warps, class T>
struct TileCopier {
    static constexpr int chunk = 16 / sizeof(T);
    static constexpr int lanes_per_row = Tile::cols / chunk;
    static constexpr int rows_per_step = num_warps * 32 / lanes_per_row;
    static_assert(rows_per_step % 8 == 0 && Tile::rows % rows_per_step == 0, "whole steps, of whole swizzle patterns");

    uint32_t to;
    const T *tile;  // the same for all threads; `offset` is the thread's own part, in 32 bits
    uint32_t offset;
    long long row_stride;

    __device__ void start(T *shared, const T *global, long long row_stride_) {
        const int row = threadIdx.x / lanes_per_row, col = threadIdx.x % lanes_per_row * chunk;
        to = shared_address(shared + Tile::offset(row, col));
        tile = global;
        row_stride = row_stride_;
        offset = row * static_cast<uint32_t>(row_stride) + col;
    }
    __device__ void copy(long long block, int shift = 0) const {
        const T *first = tile + block * Tile::rows * row_stride + offset;
#pragma unroll
        for (int step = 0; step < Tile::rows; step += rows_per_step)
            cp_async_16(to + shift + Tile::step(step, 0) * sizeof(T), first + step * row_stride);
    }
};

template <class Tile, int num_warps, class T>
__device__ inline void copy_tile(T *shared, const T *global, long long row_stride) {
    TileCopier<Tile, num_warps, T> copier;
    copier.start(shared, global, row_stride);
    copier.copy(0);
}
