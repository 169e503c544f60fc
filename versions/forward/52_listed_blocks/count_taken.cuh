// What some threads of a CTA take, in the order of the threads.
#pragma once
#include "tile/layout.cuh"

// How many threads before this one take something, and how many do in all.
struct Taken {
    int before, all;
};

// A CTA of so many warps asks.
template <int warps>
__device__ inline Taken count_taken(bool takes) {
    __shared__ int taken_by[warps];
    const unsigned taken = __ballot_sync(0xffffffff, takes);
    if (lane_index() == 0) taken_by[warp_index()] = __popc(taken);
    __syncthreads();  // all warps have counted
    Taken found{__popc(taken & ((1u << lane_index()) - 1)), 0};
#pragma unroll
    for (int warp = 0; warp < warps; ++warp) {
        if (warp < warp_index()) found.before += taken_by[warp];
        found.all += taken_by[warp];
    }
    __syncthreads();  // all have read them
    return found;
}
