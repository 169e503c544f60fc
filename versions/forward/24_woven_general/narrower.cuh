// Any head_dim, and any head_dim_v: tensors with fewer columns than the kernel computes.
#pragma once
#include "23_general/panels.cuh"
#include "launch.cuh"

// The parameters of a kernel that takes them.
template <class Params>
struct Narrower : Params {
    alignas(Params) int head_dim;  // a multiple of 8; not in what the alignment of the others leaves free
    int head_dim_v;                // of V and O, likewise
    FLASHLADDER_FURTHER_FIELDS(Params, head_dim, head_dim_v)
};

// The columns that tensors have of a tile's: the first `count`.
struct FirstColumns {
    int count;
    __device__ bool has(int col) const { return col < count; }
};

// Of Q and K; and of V and O from column `first` on.
template <bool narrower, class Params>
__device__ inline auto columns_of(const Params &params) {
    if constexpr (narrower)
        return FirstColumns{params.head_dim};
    else
        return AllColumns{};
}
template <bool narrower, class Params>
__device__ inline auto columns_of_v(const Params &params, int first = 0) {
    if constexpr (narrower)
        return FirstColumns{params.head_dim_v - first};
    else
        return AllColumns{};
}

// Starts a copy of the 16 bytes from column `col` on, or of zeros in the place of columns that the tensor has not.
__device__ inline void copy_columns(AllColumns, uint32_t shared, const char *global, int) { cp_async_16(shared, global); }
__device__ inline void copy_columns(const FirstColumns &columns, uint32_t shared, const char *global, int col) {
    cp_async_16_or_zeros(shared, global, columns.has(col));
}
