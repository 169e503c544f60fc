// Where things lie: threads in a CTA, elements in shared memory, lanes in a fragment.
#pragma once
#include <stdint.h>

// The number 0, as a type: what depends on it is decided before the compiler orders the code.
struct Zero {
    __device__ constexpr operator int() const { return 0; }
};

__device__ inline int lane_index() { return threadIdx.x % 32; }
__device__ inline int warp_index() { return threadIdx.x / 32; }

// warp_index(), in a form in which the compiler knows that it is the same in all lanes of a warp. A branch on it is
// then one branch for the whole warp.
__device__ inline int uniform_warp_index() { return __shfl_sync(0xffffffff, warp_index(), 0); }

// A tile in shared memory, in the order of global memory. Rows of 128 16-bit elements are 256 bytes apart. That is a
// multiple of 128 bytes, after which the 32 banks repeat. So the same 16 bytes of 8 rows lie in the same four banks.
template <int rows_, int cols_>
struct RowMajor {
    static constexpr int rows = rows_;
    static constexpr int cols = cols_;
    static constexpr int size = rows * cols;
    static constexpr int row_pitch = cols;

    // The position of an element, in elements from the tile's start.
    __device__ static constexpr int offset(int row, int col) { return row * cols + col; }
};

// The same tile with the 16-byte chunks of each row permuted. Chunk c of row r lies where chunk c ^ (r % 8) would lie.
//
//     row 0:  0 1 2 3 4 5 6 7        8 rows of one column now lie in 8 different
//     row 1:  1 0 3 2 5 4 7 6        groups of four banks, whichever column it is:
//     row 2:  2 3 0 1 6 7 4 5        an 8 x 8 block is read in one wavefront.
//     ...
template <int rows_, int cols_>
struct Swizzled {
    static constexpr int rows = rows_;
    static constexpr int cols = cols_;
    static constexpr int size = rows * cols;
    static constexpr int row_pitch = cols;

    __device__ static constexpr int offset(int row, int col) { return row * cols + (col ^ row % 8 * 8); }

    // How far apart two elements lie whose rows differ by `row`, a multiple of 8, and whose columns differ by `col`, a
    // multiple of 64. The swizzle is the same for both.
    __device__ static constexpr int step(int row, int col) { return row * cols + col; }
};

// The tile cut into panels of 64 columns, each swizzled as above: [cols / 64][rows][64]. The step from one panel to the
// next is a constant, whatever the number of columns. Some columns of the last panel may stay empty. In a narrower panel two
// or four rows lie in 128 bytes and are permuted alike, which is the hardware's 64- or 32-byte swizzle.
template <int rows_, int cols_, int panel_cols = 64>
struct SwizzledPanels {
    static constexpr int rows = rows_;
    static constexpr int cols = cols_;
    static constexpr int panels = (cols + panel_cols - 1) / panel_cols;
    static constexpr int size = panels * rows * panel_cols;
    static constexpr int row_pitch = panel_cols;

    __device__ static constexpr int offset(int row, int col) {
        return col / panel_cols * rows * panel_cols + row * panel_cols +
               (col % panel_cols ^ row / (64 / panel_cols) % (panel_cols / 8) * 8);
    }
    __device__ static constexpr int step(int row, int col) { return row * panel_cols + col / panel_cols * rows * panel_cols; }
};

// An mma accumulator of 16 x 8 floats. Lane l holds row l / 4, columns 2 * (l % 4) and the next, in c[0] and c[1]. It
// holds the same columns of row l / 4 + 8 in c[2] and c[3].
__device__ inline int accumulator_row() { return lane_index() / 4; }
__device__ inline int accumulator_col() { return lane_index() % 4 * 2; }
