// Small kernels in which CTAs meet in global memory: right, and with one defect each. A workspace is zero at first.
#include <stdint.h>

enum Defect {
    none, no_fence, narrow_fence, no_acquire, narrow_atomic, no_barrier, relaxed, narrow_release, relaxed_wait, no_wait,
    no_release, all_fence, volatile_data, overlap, read_early, no_grid_wait, one_thread_waits, one_for_all
};

#define KERNEL(name, defect) \
    extern "C" __global__ void __launch_bounds__(64) name##_##defect(int *work, unsigned *flag, int *out) { \
        name<defect>(work, flag, out); \
    }

// The last CTA to draw a ticket sums up what all have left, as CUDA's threadFenceReduction does.
template <Defect defect>
__device__ inline void last_block(int *work, unsigned *flag, int *out) {
    __shared__ bool is_last;
    if (threadIdx.x == 0) {
        if (defect == volatile_data) *static_cast<volatile int *>(work + blockIdx.x) = blockIdx.x + 1;
        else work[blockIdx.x] = blockIdx.x + 1;  // left
        if (defect == narrow_fence) __threadfence_block();
        else if (defect != no_fence) __threadfence();
        const unsigned last = gridDim.x - 1;
        is_last = (defect == narrow_atomic ? atomicInc_block(flag, last) : atomicInc(flag, last)) == last;
        if (defect != no_acquire && defect != volatile_data) __threadfence();
    }
    __syncthreads();
    if (!is_last || threadIdx.x) return;
    int sum = 0;
    for (int i = 0; i < gridDim.x; ++i)
        sum += defect == volatile_data ? *static_cast<volatile int *>(work + i) : work[i];  // collected
    *out = sum;
    *flag = 0;
}
KERNEL(last_block, none)
KERNEL(last_block, no_fence)
KERNEL(last_block, narrow_fence)
KERNEL(last_block, no_acquire)
KERNEL(last_block, narrow_atomic)
KERNEL(last_block, volatile_data)

__device__ inline unsigned add_acq_rel(unsigned *p) {
    unsigned old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(old) : "l"(__cvta_generic_to_global(p)) : "memory");
    return old;
}

// Split-K: all threads of a CTA leave a part, and the last CTA combines them.
template <Defect defect>
__device__ inline void split_k(int *work, unsigned *flag, int *out) {
    __shared__ unsigned ticket;
    work[64 * blockIdx.x + threadIdx.x] = threadIdx.x + blockIdx.x;  // left
    if (defect == all_fence) __threadfence();
    if (defect != no_barrier) __syncthreads();
    if (threadIdx.x == 0) ticket = defect == relaxed || defect == all_fence ? atomicAdd(flag, 1) : add_acq_rel(flag);
    __syncthreads();
    if (ticket != gridDim.x - 1) return;
    if (defect == all_fence) __threadfence();
    int sum = 0;
    for (int i = 0; i < gridDim.x; ++i) sum += work[64 * i + threadIdx.x];  // collected
    out[threadIdx.x] = sum;
}
KERNEL(split_k, none)
KERNEL(split_k, all_fence)
KERNEL(split_k, no_barrier)
KERNEL(split_k, relaxed)

// CTAs add to one tile in turn, the last one first: each waits for its turn at a semaphore.
template <Defect defect>
__device__ inline void in_turn(int *work, unsigned *flag, int *out) {
    const unsigned turn = gridDim.x - 1 - blockIdx.x;
    if (threadIdx.x == 0 && defect != no_wait) {
        unsigned now;
        do {
            if (defect == relaxed_wait)
                asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(__cvta_generic_to_global(flag)) : "memory");
            else
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(__cvta_generic_to_global(flag)) : "memory");
        } while (now != turn);  // waited
    }
    __syncthreads();
    work[threadIdx.x] += blockIdx.x + 1;  // added
    if (defect != no_barrier) __syncthreads();
    if (threadIdx.x == 0 && !(defect == no_release && turn == 1)) {
        const auto place = __cvta_generic_to_global(flag);
        if (defect == relaxed) asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(place), "r"(turn + 1) : "memory");
        else if (defect == narrow_release)
            asm volatile("st.release.cta.global.u32 [%0], %1;" ::"l"(place), "r"(turn + 1) : "memory");  // released narrowly
        else asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(place), "r"(turn + 1) : "memory");
    }
    if (threadIdx.x == 0 && turn == gridDim.x - 1) *out = work[0];
}
KERNEL(in_turn, none)
KERNEL(in_turn, no_wait)
KERNEL(in_turn, relaxed_wait)
KERNEL(in_turn, no_barrier)
KERNEL(in_turn, relaxed)
KERNEL(in_turn, narrow_release)
KERNEL(in_turn, no_release)

// CTAs draw tiles from a counter and write them; and all add to one sum.
template <Defect defect>
__device__ inline void drawn(int *work, unsigned *flag, int *out) {
    __shared__ unsigned tile;
    for (;;) {
        if (threadIdx.x == 0) tile = atomicAdd(flag, 1);
        __syncthreads();
        const unsigned mine = tile;
        __syncthreads();
        if (mine >= 10) break;
        const unsigned at = (defect == overlap ? 32 : 64) * mine + threadIdx.x;
        work[at] = at;  // written
        atomicAdd(out, 1);
    }
    if (defect == read_early && threadIdx.x == 0) work[blockIdx.x] = *out;  // read early
}
KERNEL(drawn, none)
KERNEL(drawn, overlap)
KERNEL(drawn, read_early)

// What an earlier grid has left in the workspace, which may still run: programmatic dependent launch.
template <Defect defect>
__device__ inline void after_prior(int *work, unsigned *flag, int *out) {
    if (defect == none || (defect != no_grid_wait && threadIdx.x == 0)) asm volatile("griddepcontrol.wait;" ::: "memory");
    if (defect == one_for_all) __syncthreads();  // one thread waits for all
    if (blockIdx.x == 0) out[threadIdx.x] = work[threadIdx.x];  // left by the earlier grid
}
KERNEL(after_prior, none)
KERNEL(after_prior, one_for_all)
KERNEL(after_prior, no_grid_wait)
KERNEL(after_prior, one_thread_waits)
