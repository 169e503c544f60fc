// Copies tiles of panels to and from global memory, with any row stride. Rows may end in the middle of a tile.
#pragma once
#include "layout.cuh"
#include "ptx.cuh"

// Copies a tile by panels of 64 columns, 16 bytes per lane, 8 lanes per row. A thread has the same 8 columns of every
// panel, and rows that are a multiple of 8 apart. This takes one address in shared memory, and one multiplication per
// row in global memory. `start` works out the thread's own part. `copy` copies tile number `block`, counted from the
// address that `start` got, to `shift` bytes behind its place.
template <class Tile, int num_warps, class T>
struct PanelCopier {
    static constexpr int rows_per_step = num_warps * 4;
    static_assert(rows_per_step % 8 == 0 && Tile::rows % rows_per_step == 0, "whole steps, of whole swizzle patterns");

    uint32_t to;
    const char *from;
    int row_bytes;  // the host refuses a row stride that does not fit

    __device__ void start(T *shared, const T *global, long long row_stride) {
        to = shared_address(shared + Tile::offset(row(), col()));
        from = reinterpret_cast<const char *>(global + col());
        row_bytes = static_cast<int>(row_stride * sizeof(T));
    }
    // A block with all its rows.
    __device__ void copy(int block, int shift = 0) const {
        each_chunk(block, shift, [](uint32_t shared, const char *global, int) { cp_async_16(shared, global); });
    }
    // A block of which only the first `rows` rows exist. Zeros take the place of the others.
    __device__ void copy_rows(int block, int rows, int shift = 0) const {
        each_chunk(block, shift, [&](uint32_t shared, const char *global, int step) {
            cp_async_16_or_zeros(shared, global, row() + step < rows);
        });
    }

    __device__ static int row() { return threadIdx.x / 8; }
    __device__ static int col() { return threadIdx.x % 8 * 8; }

    // Visits the panels in which the thread's columns exist.
    template <class Visit>
    __device__ static void each_panel(Visit visit) {
#pragma unroll
        for (int panel = 0; panel < Tile::panels; ++panel)
            if ((panel + 1) * 64 <= Tile::cols || panel * 64 + col() < Tile::cols) visit(panel);
    }

  private:
    template <class Copy>
    __device__ void each_chunk(int block, int shift, Copy copy) const {
        const int first = block * Tile::rows + row();
#pragma unroll
        for (int step = 0; step < Tile::rows; step += rows_per_step) {
            const char *chunk = from + static_cast<long long>(first + step) * row_bytes;
            each_panel([&](int panel) {
                copy(to + shift + Tile::step(step, panel * 64) * sizeof(T), chunk + panel * 64 * sizeof(T), step);
            });
        }
    }
};

// Copies blocks of K and V as StageCopier does: from the last to the first, and each block from its last rows to its
// first. So one pointer into each tensor runs backwards through it. Unlike StageCopier it copies by panels, and takes
// any row strides.
template <class Tile, int num_warps, class T>
struct PanelStageCopier {
    using Whole = PanelCopier<Tile, num_warps, T>;
    static constexpr int rows_per_step = Whole::rows_per_step, steps = Tile::rows / rows_per_step;

    uint32_t to_k, to_v;  // where the next block is to lie
    const char *k, *v;
    int k_step, v_step;  // bytes; 64 bits would take two registers each, and many more instructions

    __device__ void start(T *shared_k, T *shared_v, long long k_row_stride, long long v_row_stride) {
        to_k = shared_address(shared_k + Tile::offset(Whole::row(), Whole::col()));
        to_v = shared_address(shared_v + Tile::offset(Whole::row(), Whole::col()));
        k_step = static_cast<int>(rows_per_step * sizeof(T) * k_row_stride);  // the host takes no stride that does not fit
        v_step = static_cast<int>(rows_per_step * sizeof(T) * v_row_stride);
    }
    // Copies block `block`, of which the first `rows` are there, to so many bytes from where the next block is to lie.
    __device__ void copy_block(const T *k_, const T *v_, int block, int rows, int k_shift, int v_shift) {
        copy_first_rows(to_k + k_shift, k, k_, k_step, block, rows);
        copy_first_rows(to_v + v_shift, v, v_, v_step, block, rows);
    }
    // Copies piece number `piece` of the next block, which has `pieces` of them.
    template <int pieces>
    __device__ void copy(int piece) {
        constexpr int count = steps / pieces;
        copy_steps<count>(to_k, piece, k, k_step);
        copy_steps<count>(to_v, piece, v, v_step);
        keep_in_place(k, v);
    }
    // The same, woven into `count` steps of something else, of which this is step t.
    template <int pieces>
    __device__ void copy_part(int t, int count) {
        if (t % (count / pieces) == 0) copy<pieces>(t / (count / pieces));
    }

  private:
    __device__ static void copy_first_rows(uint32_t tile, const char *&from, const T *tensor, int step, int block,
                                           int rows) {
        Whole copier;
        copier.to = tile;
        copier.from = reinterpret_cast<const char *>(tensor + Whole::col());
        copier.row_bytes = step / rows_per_step;
        copier.copy_rows(block, rows);
        from = copier.from + static_cast<long long>(block * Tile::rows - rows_per_step + Whole::row()) * copier.row_bytes;
    }
    template <int count>
    __device__ static void copy_steps(uint32_t tile, int piece, const char *&from, int step) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            Whole::each_panel([&](int panel) {
                cp_async_16(tile + Tile::step((steps - 1 - piece * count - i) * rows_per_step, panel * 64) * sizeof(T),
                            from + panel * 64 * sizeof(T));
            });
            from -= step;
        }
    }
};

// Copies a warp's rows of a tile from shared to global memory, but only those before row `end` of the tile.
template <class Tile, int rows, class Store, class T>
__device__ inline void store_rows_before(int end, T *global, long long row_stride, const T *shared, int first_row) {
    const int col = lane_index() % 8 * 8;
#pragma unroll
    for (int step = 0; step < rows; step += 4) {
        const int row = first_row + step + lane_index() / 8;
        if (row >= end) return;
#pragma unroll
        for (int panel = 0; panel < Tile::panels; ++panel)
            if ((panel + 1) * 64 <= Tile::cols || panel * 64 + col < Tile::cols)
                Store::store(global + row * row_stride + panel * 64 + col,
                             load_shared_16(shared_address(shared + Tile::offset(row, panel * 64 + col))));
    }
}
