// Copies blocks of K and V into shared memory.
#pragma once
#include "ptx/sm80.cuh"

// Copies the blocks from the last to the first, and each block from its last rows to its first, 16 bytes per lane. So
// one pointer into each tensor runs backwards through it. The rows of one thread are a multiple of 8 apart, so all have
// the same swizzle. They need one address in shared memory, and constants from there.
template <class Tile, int num_warps, class T>
struct StageCopier {
    static constexpr int chunk = 16 / sizeof(T);
    static constexpr int lanes_per_row = Tile::cols / chunk;
    static constexpr int rows_per_step = num_warps * 32 / lanes_per_row;
    static constexpr int steps = Tile::rows / rows_per_step;
    static_assert(rows_per_step % 8 == 0 && Tile::rows % rows_per_step == 0, "whole steps, of whole swizzle patterns");

    uint32_t to_k, to_v;  // where the next block is to lie
    const T *k, *v;
    long long row_stride;

    __device__ void start(T *shared_k, T *shared_v, long long row_stride_) {
        to_k = shared_address(shared_k + Tile::offset(row(), col()));
        to_v = shared_address(shared_v + Tile::offset(row(), col()));
        row_stride = row_stride_;
    }
    // Copies block `block` whole, to so many bytes from where the next block is to lie. The next is then block - 1.
    __device__ void copy_block(const T *k_, const T *v_, int block, int k_shift, int v_shift) {
        const long long offset = ((block + 1LL) * Tile::rows - rows_per_step + row()) * row_stride + col();
        k = k_ + offset;
        v = v_ + offset;
        copy<1>(0, k_shift, v_shift);
    }
    // Copies piece number `piece` of the next block, which has `pieces` of them.
    template <int pieces>
    __device__ void copy(int piece, int k_shift = 0, int v_shift = 0) {
        constexpr int count = steps / pieces;
        copy_rows<count>(to_k + k_shift, piece, k);
        copy_rows<count>(to_v + v_shift, piece, v);
        keep_in_place(k, v);
    }
    // The same, woven into `count` steps of something else, of which this is step t.
    template <int pieces>
    __device__ void copy_part(int t, int count) {
        if (t % (count / pieces) == 0) copy<pieces>(t / (count / pieces));
    }

  private:
    __device__ static int row() { return threadIdx.x / lanes_per_row; }
    __device__ static int col() { return threadIdx.x % lanes_per_row * chunk; }

    template <int count>
    __device__ void copy_rows(uint32_t tile, int piece, const T *&from) {
#pragma unroll
        for (int i = 0; i < count; ++i)
            cp_async_16(tile + Tile::step((steps - 1 - piece * count - i) * rows_per_step, 0) * sizeof(T),
                        from - i * rows_per_step * row_stride);
        from -= count * rows_per_step * row_stride;
    }
};
