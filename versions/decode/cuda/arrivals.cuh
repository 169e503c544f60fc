// CTAs that have parts of the same work, and which of them is the last one to be done.
#pragma once

// Whether this CTA is the last of `ctas` to come here, for all threads that `sync` together, the first one among them. What
// the others wrote before they came is then there to be read. The last one leaves the counter at zero. `is_last` lies in
// shared memory.
template <class Sync>
__device__ inline bool is_last_of(int ctas, unsigned *arrived, bool &is_last, Sync sync) {
    sync();  // every thread has written its part
    if (threadIdx.x == 0) {
        __threadfence();  // before others learn that it is there
        is_last = atomicInc(arrived, ctas - 1) == ctas - 1;
        __threadfence();  // behind what the others say by their arrival
    }
    sync();
    return is_last;
}
template <class Sync>
__device__ inline bool is_last_of(int ctas, unsigned *arrived, Sync sync) {
    __shared__ bool is_last;
    return is_last_of(ctas, arrived, is_last, sync);
}
__device__ inline bool is_last_of(int ctas, unsigned *arrived) {
    return is_last_of(ctas, arrived, [] { __syncthreads(); });
}
