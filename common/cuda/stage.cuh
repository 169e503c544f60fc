// Copies blocks of K and V into shared memory.
#pragma once
#include "layout.cuh"
#include "ptx.cuh"

// Takes the blocks from the last to the first, and each block from its last rows to its first, 16 bytes per lane. So
// one pointer into each tensor runs backwards through it. A thread's rows are a multiple of 8 apart and have the same
// swizzle: one address in shared memory, and constants from there. The tile of V lies `to_v` bytes behind that of K.
template <class Tile, int num_warps, class T>
struct StageCopier {
    static constexpr int chunk = 16 / sizeof(T);
    static constexpr int lanes_per_row = Tile::cols / chunk;
    static constexpr int rows_per_step = num_warps * 32 / lanes_per_row;
    static constexpr int steps = Tile::rows / rows_per_step;
    static_assert(rows_per_step % 8 == 0 && Tile::rows % rows_per_step == 0, "whole steps, of whole swizzle patterns");

    uint32_t to;
    int to_v = Tile::size * sizeof(T);
    const T *k, *v;
    long long row_stride;

    __device__ void start(T *shared, long long row_stride_) {
        to = shared_address(shared + Tile::offset(row(), col()));
        row_stride = row_stride_;
    }
    // Makes `block` the next to be copied.
    __device__ void rewind(const T *k_, const T *v_, int block) {
        const long long offset = ((block + 1LL) * Tile::rows - rows_per_step + row()) * row_stride + col();
        k = k_ + offset;
        v = v_ + offset;
    }
    // Copies piece number `piece` of the next block, which has `pieces` of them. K and V go to `k_shift` and `v_shift`
    // bytes behind the places that `to` and `to_v` say.
    template <int pieces>
    __device__ void copy(int piece, int k_shift = 0, int v_shift = 0) {
        constexpr int count = steps / pieces;
        copy_rows<count>(to + k_shift, piece, k);
        copy_rows<count>(to + to_v + v_shift, piece, v);
        // Makes the compiler move the pointers here. It would else keep offsets from the start of the loop, in further
        // registers.
        asm volatile("" : "+l"(k), "+l"(v));
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
