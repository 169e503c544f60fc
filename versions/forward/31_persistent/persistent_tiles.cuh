// The tiles of a persistent grid: a CTA computes one after the other, its own number first, then each that is as many
// further as there are CTAs. Rows of a head come first, so that CTAs which run together read the same K and V.
#pragma once
#include "params.cuh"

template <int block_m>
struct PersistentTiles {
    const AttentionParams &params;
    const int blocks, count;
    int number = blockIdx.x;

    __device__ explicit PersistentTiles(const AttentionParams &params_)
        : params(params_), blocks((params.seqlen_q + block_m - 1) / block_m),
          count(blocks * params.num_heads * params.batch) {}

    __device__ bool any() const { return number < count; }
    __device__ void next() { number += gridDim.x; }

    __device__ int first_row() const { return number % blocks * block_m; }
    __device__ int head() const { return number / blocks % params.num_heads; }
    __device__ int batch() const { return number / blocks / params.num_heads; }
    __device__ float *lse() const {
        return params.lse + (static_cast<long long>(batch()) * params.num_heads + head()) * params.seqlen_q + first_row();
    }
};
