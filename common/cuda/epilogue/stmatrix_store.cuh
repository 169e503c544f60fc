// Registers -> shared memory -> global memory, as in tma_store.cuh, with less to do once the last product has come.
#pragma once
#include "epilogue/tma_store.cuh"
#include "ptx/sm90.cuh"
#include "tile/fragment.cuh"
#include "tile/reader.cuh"

// All stores of this warp have read their shared memory. No branch: a lane that has started none does not wait.
__device__ inline void wait_for_own_stores() {
    tma_store_wait_read();
    __syncwarp();
}

// Starts storing a warp's rows, whose place in shared memory is free. O goes there by stmatrix, 16 x 16 at a time; `place`
// has the lane's address.
template <class Tile, class T, int head_dim>
__device__ inline void start_store_by_blocks(T *tile, int first_row, const HoistedReader<Tile, T> &place,
                                             const Accumulator<16, head_dim> &o, const TensorMapBytes &map, int row, int head,
                                             int batch) {
    const auto rounded = round_to_operand<T>(o);  // blocks as ldmatrix has them
#pragma unroll
    for (int step = 0; step < head_dim / 16; ++step) stmatrix_x4(place.address(0, step * 16), rounded.block[step][0]);
    start_storing<Tile>(tile, first_row, map, row, head, batch);
    __syncwarp();
}
