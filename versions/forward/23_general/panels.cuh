// Copies tiles of panels to and from global memory, with any row stride. Rows may end in the middle of a tile.
#pragma once
#include "ptx/sm80.cuh"
#include "tile/layout.cuh"

// The columns that tensors have of a tile's: all of them.
struct AllColumns {
    __device__ static constexpr bool has(int) { return true; }
};

// Copies a tile by panels of 64 columns, 16 bytes per lane, 8 lanes per row. A thread has the same 8 columns of every
// panel, and rows that are a multiple of 8 apart. This takes one address in shared memory, and one multiplication per
// row in global memory. `start` works out the thread's own part. `copy` copies tile number `block`, counted from the
// address that `start` got, to `shift` bytes behind its place. Zeros take the place of columns that the tensor has not.
template <class Tile, int num_warps, class T, class Columns = AllColumns>
struct PanelCopier : Columns {
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
        each_chunk(block, shift, [](uint32_t shared, const char *global, int, int) { cp_async_16(shared, global); });
    }
    // A block of which only the first `rows` rows exist. Zeros take the place of the others.
    __device__ void copy_rows(int block, int rows, int shift = 0) const {
        each_chunk(block, shift, [&](uint32_t shared, const char *global, int step, int col) {
            cp_async_16_or_zeros(shared, global, row() + step < rows && this->has(col));
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
                copy(to + shift + Tile::step(step, panel * 64) * sizeof(T), chunk + panel * 64 * sizeof(T), step,
                     panel * 64 + col());
            });
        }
    }
};

// Copies a warp's rows of a tile from shared to global memory, but only those before row `end` of the tile, and only the
// columns that the tensor has.
template <class Tile, int rows, class Store, class T, class Columns = AllColumns>
__device__ inline void store_rows_before(int end, T *global, long long row_stride, const T *shared, int first_row,
                                         const Columns &columns = {}) {
    const int col = lane_index() % 8 * 8;
#pragma unroll
    for (int step = 0; step < rows; step += 4) {
        const int row = first_row + step + lane_index() / 8;
        if (row >= end) return;
#pragma unroll
        for (int panel = 0; panel < Tile::panels; ++panel)
            if (((panel + 1) * 64 <= Tile::cols || panel * 64 + col < Tile::cols) && columns.has(panel * 64 + col))
                Store::store(global + row * row_stride + panel * 64 + col,
                             load_shared_16(shared_address(shared + Tile::offset(row, panel * 64 + col))));
    }
}
