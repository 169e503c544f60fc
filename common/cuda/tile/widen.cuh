// P of fewer keys than a block has.
#pragma once
#include "tile/gemm.cuh"

// The same for k keys: those that are added weigh nothing.
template <int k, int fewer>
__device__ inline HeldA<16, k> widen(const HeldA<16, fewer> &p) {
    HeldA<16, k> wide;
#pragma unroll
    for (int step = 0; step < k / 16; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) wide.block[step][0][i] = step < fewer / 16 ? p.block[step][0][i] : 0;
    return wide;
}
