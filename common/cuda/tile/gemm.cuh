// One warp's share of a product of tiles: C += A B, in steps of 16 along k. Operands are held in registers, or streamed
// from shared memory.
#pragma once
#include "tile/fragment.cuh"
#include "tile/reader.cuh"

// The part of an operand that is in registers while the operand streams from shared memory. A k-step has `count` blocks
// of 16 x 16. One load brings `fragments` blocks of 8 along k; 0 means all of them. `buffers` is 2 if a load may arrive
// while the one before is still in use.
template <int count, int k, int fragments, int buffers>
struct Stream {
    static constexpr int steps = fragments == 0 ? k / 16 : fragments / 2;
    static constexpr int slots = steps * 16 < k ? steps * buffers : steps;
    uint32_t block[slots][count][4];

    // Loads `steps` k-steps from `step` on, if a load begins with this step.
    template <class Load>
    __device__ void fetch(int step, Load load) {
        if (step % steps != 0) return;
#pragma unroll
        for (int s = step; s < step + steps; ++s)
#pragma unroll
            for (int b = 0; b < count; ++b) load(block[s % slots][b], b * 16, s * 16);
    }
};

// Q as the A operand of Q K^T, streamed.
template <int rows, int k, int fragments, class Reader, int buffers = 1>
struct QOperand {
    Reader reader;
    Stream<rows / 16, k, fragments, buffers> stream;

    template <class T>
    __device__ void start(const T *tile, int first_row) {
        reader.start(tile, first_row);
    }
    __device__ void fetch(int step) {
        stream.fetch(step, [&](uint32_t (&block)[4], int m, int k_) { ldmatrix_x4(block, reader.address(m, k_)); });
    }
    __device__ const uint32_t (&at(int step, int m) const)[4] { return stream.block[step % stream.slots][m]; }
};

// With 0 fragments, Q is read once, before the loop over K and V, and held.
template <int rows, int k, class Reader, int buffers>
struct QOperand<rows, k, 0, Reader, buffers> : HeldA<rows, k> {
    template <class T>
    __device__ void start(const T *tile, int first_row) {
        Reader reader;
        reader.start(tile, first_row);
#pragma unroll
        for (int step = 0; step < k / 16; ++step)
#pragma unroll
            for (int m = 0; m < rows / 16; ++m) ldmatrix_x4(this->block[step][m], reader.address(m * 16, step * 16));
    }
};

// K as the B operand of Q K^T. The tile's rows are the columns of S, so blocks are read as they lie.
template <int n, int k, int fragments, class Reader, int buffers = 1>
struct KOperand {
    Reader reader;
    Stream<n / 16, k, fragments, buffers> stream;

    __device__ void fetch(int step) {
        stream.fetch(step, [&](uint32_t (&block)[4], int n_, int k_) { ldmatrix_x4(block, reader.address(n_, k_)); });
    }
    // The 16 x 8 operand for the columns from 8 * n8 on; of its two halves along k, number `half`.
    __device__ uint32_t at(int step, int n8, int half) const {
        return stream.block[step % stream.slots][n8 / 2][Reader::Lanes::block(n8 % 2, half)];
    }
};

// V as the B operand of P V. The tile's rows run along k, so blocks are transposed on their way.
template <int n, int k, int fragments, class Reader, int buffers = 1>
struct VOperand {
    Reader reader;
    Stream<n / 16, k, fragments, buffers> stream;

    __device__ void fetch(int step) {
        stream.fetch(step, [&](uint32_t (&block)[4], int n_, int k_) { ldmatrix_x4_trans(block, reader.address(k_, n_)); });
    }
    __device__ uint32_t at(int step, int n8, int half) const {
        return stream.block[step % stream.slots][n8 / 2][Reader::Lanes::block(half, n8 % 2)];
    }
};

// The order of the mmas in one k-step. It visits every (m, n) of blocks_m x blocks_n once.
struct RowsFirst {
    template <int blocks_m, int blocks_n, class Mma>
    __device__ static void visit(Mma mma) {
#pragma unroll
        for (int m = 0; m < blocks_m; ++m)
#pragma unroll
            for (int n = 0; n < blocks_n; ++n) mma(m, n);
    }
};
// Column by column, down one and up the next. Every mma shares an operand with the one before it.
struct Serpentine {
    template <int blocks_m, int blocks_n, class Mma>
    __device__ static void visit(Mma mma) {
#pragma unroll
        for (int n = 0; n < blocks_n; ++n)
#pragma unroll
            for (int m = 0; m < blocks_m; ++m) mma(n % 2 == 0 ? m : blocks_m - 1 - m, n);
    }
};

// Nothing more to do in a k-step.
struct Nothing {
    __device__ void operator()(int) const {}
};

// C += A B. With `ahead`, operands are fetched one k-step before they are used. `also(step)` comes first in each k-step.
template <class T, int k, bool ahead = false, class Order = RowsFirst, int rows, int cols, class A, class B,
          class Also = Nothing>
__device__ inline void gemm(Accumulator<rows, cols> &c, A &a, B &b, Also also = {}) {
#pragma unroll
    for (int step = 0; step < k / 16; ++step) {
        if (!ahead || step == 0) {
            a.fetch(step);
            b.fetch(step);
        }
        if (ahead && step + 1 < k / 16) {
            a.fetch(step + 1);
            b.fetch(step + 1);
        }
        also(step);
        Order::template visit<rows / 16, cols / 8>([&](int m, int n) {
            mma_m16n8k16<T>(c.block[m][n], a.at(step, m), b.at(step, n, 0), b.at(step, n, 1));
        });
    }
}
