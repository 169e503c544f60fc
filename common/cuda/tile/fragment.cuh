// A warp's share of a matrix, in registers, as mma has it.
#pragma once
#include "ptx/sm80.cuh"
#include "tile/layout.cuh"

// A warp's C: rows x cols floats, in blocks of 16 x 8.
template <int rows_, int cols_>
struct Accumulator {
    static constexpr int rows = rows_;
    static constexpr int cols = cols_;
    float block[rows / 16][cols / 8][4];

    __device__ void clear() {
#pragma unroll
        for (int m = 0; m < rows / 16; ++m)
#pragma unroll
            for (int n = 0; n < cols / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) block[m][n][i] = 0.0f;
    }
};

// Reductions over the four lanes that share a row of an accumulator.
__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// An A operand of rows x k in registers, in blocks of 16 x 16.
template <int rows, int k>
struct HeldA {
    uint32_t block[k / 16][rows / 16][4];

    __device__ void fetch(int) {}
    __device__ const uint32_t (&at(int step, int m) const)[4] { return block[step][m]; }
};

// An accumulator as the A operand of the next product: two neighbouring 16 x 8 blocks are one 16 x 16 operand block, lane
// by lane.
template <class T, int rows, int cols>
__device__ inline HeldA<rows, cols> round_to_operand(const Accumulator<rows, cols> &p) {
    HeldA<rows, cols> a;
#pragma unroll
    for (int step = 0; step < cols / 16; ++step)
#pragma unroll
        for (int m = 0; m < rows / 16; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float (&block)[4] = p.block[m][step * 2 + i / 2];
                a.block[step][m][i] = pack<T>(block[i % 2 * 2], block[i % 2 * 2 + 1]);
            }
    return a;
}
