// Any head_dim: tensors with fewer columns than the kernel computes.
#pragma once
#include "23_general/panels.cuh"
#include "launch.cuh"

// The parameters of a kernel that takes them.
template <class Params>
struct Narrower : Params {
    alignas(Params) int head_dim;  // a multiple of 8; not in what the alignment of the others leaves free
    FLASHLADDER_FURTHER_FIELDS(Params, head_dim)
};

// The columns that tensors have of a tile's: the first `count`.
struct FirstColumns {
    int count;
    __device__ bool has(int col) const { return col < count; }
};

template <bool narrower, class Params>
__device__ inline auto columns_of(const Params &params) {
    if constexpr (narrower)
        return FirstColumns{params.head_dim};
    else
        return AllColumns{};
}

// Starts a copy of the 16 bytes from column `col` on, or of zeros in the place of columns that the tensor has not.
__device__ inline void copy_columns(AllColumns, uint32_t shared, const char *global, int) { cp_async_16(shared, global); }
__device__ inline void copy_columns(const FirstColumns &columns, uint32_t shared, const char *global, int col) {
    cp_async_16_or_zeros(shared, global, columns.has(col));
}
