// A warpgroup's keys and values as operands that stay.
#pragma once
#include "warpgroup_tiles.cuh"

#include <type_traits>

// K and V as operands of S^T and dP^T: in shared memory, or a warp's 16 keys in registers.
using KeyOperand = std::conditional_t<config::held_keys, HeldA<16, config::head_dim>, ByRows<KTile>>;
__device__ inline void start_operand(ByRows<KTile> &a, const config::dtype *tile, int warp_key) { a.start(tile, warp_key); }
__device__ inline void start_operand(HeldA<16, config::head_dim> &a, const config::dtype *tile, int warp_key) {
    HoistedReader<KTile, config::dtype> reader;
    reader.start(tile, warp_key);
#pragma unroll
    for (int step = 0; step < config::head_dim / 16; ++step) ldmatrix_x4(a.block[step][0], reader.address(0, step * 16));
}
