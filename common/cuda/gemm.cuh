// Products of tiles, one warp's share: C += A B, k in steps of 16, operands in registers or streamed from shared memory.
#pragma once
#include "load.cuh"

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

// How many k-steps of 16 one load brings: `fragments` counts blocks of 8 along k, and 0 means all of them.
__host__ __device__ constexpr int steps_per_load(int fragments, int k) { return fragments == 0 ? k / 16 : fragments / 2; }

// An A operand of rows x k in registers, in blocks of 16 x 16.
template <int rows, int k>
struct HeldA {
    uint32_t block[k / 16][rows / 16][4];

    __device__ void fetch(int) {}
    __device__ const uint32_t (&at(int step, int m) const)[4] { return block[step][m]; }
};

// Q as the A operand of Q K^T, streamed from shared memory while the product goes on, like K and V below: `fetch(step)`
// loads `steps` k-steps, from `step` on, when `step` is the first of them...
template <int rows, int k, int fragments, class Reader>
struct QOperand {
    static constexpr int steps = steps_per_load(fragments, k);
    Reader reader;
    int first_row;
    uint32_t block[steps][rows / 16][4];

    __device__ void load(Reader reader_, int first_row_) {
        reader = reader_;
        first_row = first_row_;
    }
    __device__ void fetch(int step) {
        if (step % steps != 0) return;
#pragma unroll
        for (int s = 0; s < steps; ++s)
#pragma unroll
            for (int m = 0; m < rows / 16; ++m) reader.load(block[s][m], first_row + m * 16, (step + s) * 16);
    }
    __device__ const uint32_t (&at(int step, int m) const)[4] { return block[step % steps][m]; }
};

// ... or, with no fragments a step, read once before the loop over K and V and held.
template <int rows, int k, class Reader>
struct QOperand<rows, k, 0, Reader> : HeldA<rows, k> {
    __device__ void load(Reader reader, int first_row) {
#pragma unroll
        for (int step = 0; step < k / 16; ++step)
#pragma unroll
            for (int m = 0; m < rows / 16; ++m) reader.load(this->block[step][m], first_row + m * 16, step * 16);
    }
};

// K as the B operand of Q K^T: tile rows are columns of S, so blocks are read as they lie.
template <int n, int k, int fragments, class Reader>
struct KOperand {
    static constexpr int steps = steps_per_load(fragments, k);
    Reader reader;
    uint32_t block[steps][n / 16][4];

    __device__ void fetch(int step) {
        if (step % steps != 0) return;
#pragma unroll
        for (int s = 0; s < steps; ++s)
#pragma unroll
            for (int b = 0; b < n / 16; ++b) reader.load(block[s][b], b * 16, (step + s) * 16);
    }
    __device__ uint32_t low(int step, int n8) const { return block[step % steps][n8 / 2][n8 % 2]; }
    __device__ uint32_t high(int step, int n8) const { return block[step % steps][n8 / 2][n8 % 2 + 2]; }
};

// V as the B operand of P V: tile rows are k, so blocks are transposed on their way.
template <int n, int k, int fragments, class Reader>
struct VOperand {
    static constexpr int steps = steps_per_load(fragments, k);
    Reader reader;
    uint32_t block[steps][n / 16][4];

    __device__ void fetch(int step) {
        if (step % steps != 0) return;
#pragma unroll
        for (int s = 0; s < steps; ++s)
#pragma unroll
            for (int b = 0; b < n / 16; ++b) reader.load_trans(block[s][b], (step + s) * 16, b * 16);
    }
    __device__ uint32_t low(int step, int n8) const { return block[step % steps][n8 / 2][n8 % 2 * 2]; }
    __device__ uint32_t high(int step, int n8) const { return block[step % steps][n8 / 2][n8 % 2 * 2 + 1]; }
};

// C += A B.
template <class T, int k, int rows, int cols, class A, class B>
__device__ inline void gemm(Accumulator<rows, cols> &c, A &a, B &b) {
#pragma unroll
    for (int step = 0; step < k / 16; ++step) {
        a.fetch(step);
        b.fetch(step);
#pragma unroll
        for (int m = 0; m < rows / 16; ++m)
#pragma unroll
            for (int n = 0; n < cols / 8; ++n)
                mma_m16n8k16<T>(c.block[m][n], a.at(step, m), b.low(step, n), b.high(step, n));
    }
}
