// 16 bytes of a row of dO and of O, as the first pass reads them.
#pragma once
#include "config.cuh"

constexpr int chunk = 16 / sizeof(config::dtype);

// The product of two chunks, summed.
__device__ inline float dot_chunk(const config::dtype *a, const config::dtype *b) {
    const uint4 a_bits = *reinterpret_cast<const uint4 *>(a), b_bits = *reinterpret_cast<const uint4 *>(b);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < chunk; ++i)
        sum += static_cast<float>(reinterpret_cast<const config::dtype *>(&a_bits)[i]) *
               static_cast<float>(reinterpret_cast<const config::dtype *>(&b_bits)[i]);
    return sum;
}
