// Any head_dim: tensors with fewer columns than the kernel computes.
#pragma once
#include "launch.cuh"
#include "ptx/sm80.cuh"

// The parameters of a kernel that takes them.
template <class Params>
struct Narrower : Params {
    alignas(Params) int head_dim;  // a multiple of 8; not in what the alignment of the others leaves free
    FLASHLADDER_FURTHER_FIELDS(Params, head_dim)
};

// The columns that tensors have of a tile's: the first `count`.
struct FirstColumns {
    int count;

    template <class Params>
    __device__ static FirstColumns of(const Params &params) {
        return {params.head_dim};
    }
    __device__ bool has(int col) const { return col < count; }
    __device__ void copy(uint32_t shared, const char *global, int col) const {
        cp_async_16_or_zeros(shared, global, has(col));
    }
};
