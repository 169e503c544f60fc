// S = Q K^T of one warp alone, by mma.sync: no other warp of its warpgroup takes part.
#pragma once
#include "ptx_async.cuh"
#include "wgmma.cuh"

template <class KVTile, int head_dim, class T, int keys, class Q>
__device__ inline void multiply_alone(Accumulator<16, keys> &s, Q &q, const T *k_tile) {
    KOperand<keys, head_dim, 2, HoistedReader<KVTile, T, ByRow>> k;
    k.reader.start(k_tile);
    s.clear();
    gemm<T, head_dim>(s, q, k);
    fence_proxy_async();  // this warp has read before TMA writes again
}
