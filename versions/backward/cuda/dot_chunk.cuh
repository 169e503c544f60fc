// 16 bytes of a row of dO and of O, as the first pass reads them.
#pragma once
#include "config.cuh"

constexpr int chunk = 16 / sizeof(config::dtype);

// The product of two chunks, summed. If `zero_wins`, one of a that is 0 gives 0, whatever b is.
template <bool zero_wins = false>
__device__ inline float dot_chunk(const config::dtype *a, const config::dtype *b) {
    const uint4 a_bits = *reinterpret_cast<const uint4 *>(a), b_bits = *reinterpret_cast<const uint4 *>(b);
    float sum = 0.0f;
    constexpr uint32_t magnitudes = 0x7fff7fff;  // without the signs
    if (zero_wins && ((a_bits.x | a_bits.y | a_bits.z | a_bits.w) & magnitudes) == 0) return sum;
#pragma unroll
    for (int i = 0; i < chunk; ++i)
        sum += static_cast<float>(reinterpret_cast<const config::dtype *>(&a_bits)[i]) *
               static_cast<float>(reinterpret_cast<const config::dtype *>(&b_bits)[i]);
    return sum;
}
