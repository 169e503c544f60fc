// fp32 sums of dQ in the order in which a warp's lanes hold them, 16 bytes a lane: a warp's part of a tile is 4 KB without a
// gap, in shared memory and in global memory alike.
#pragma once
#include "epilogue/store_by_tma.cuh"

// Visits the first columns of a warp's accumulator by blocks of 16 x 8, with the lane's place for each.
template <int cols, class Visit>
__device__ inline void each_block(Accumulator<16, cols> &c, float *sums, Visit visit, int first_cols = cols) {
#pragma unroll
    for (int n = 0; n < cols / 8; ++n)
        if (n * 8 < first_cols) visit(reinterpret_cast<float4 *>(sums) + n * 32 + lane_index(), c.block[0][n]);
}

// Puts a warp's part of dQ into shared memory, from where a bulk copy may take it.
template <int cols>
__device__ inline void stage_sums(float *staged, Accumulator<16, cols> &dq, int first_cols = cols) {
    each_block(dq, staged, [](float4 *place, const float (&x)[4]) { *place = {x[0], x[1], x[2], x[3]}; }, first_cols);
    fence_proxy_async();  // the copy sees what each lane wrote
    __syncwarp();
}

// Starts adding a warp's part of dQ to `sums` in global memory. It is staged in shared memory, from where a bulk copy takes
// it while the warp goes on.
template <int cols>
__device__ inline void start_adding(float *sums, float *staged, Accumulator<16, cols> &dq) {
    wait_for_stores();  // the sums before have been read
    stage_sums(staged, dq);
    if (lane_index() == 0) {
        bulk_add(sums, staged, 16 * cols * sizeof(float));
        tma_store_commit();
    }
    __syncwarp();
}

// The other columns are zero.
template <int cols>
__device__ inline Accumulator<16, cols> load_sums(float *sums, int first_cols = cols) {
    Accumulator<16, cols> dq;
    if (first_cols < cols) dq.clear();
    auto load = [](const float4 *place, float (&x)[4]) {
        const float4 sum = *place;
        x[0] = sum.x, x[1] = sum.y, x[2] = sum.z, x[3] = sum.w;
    };
    each_block(dq, sums, load, first_cols);
    return dq;
}
