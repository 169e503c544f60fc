// Small kernels for the emulator's tests: a pipeline of tiles, right and with one defect each.
#include <cuda_bf16.h>
#include <stdint.h>

enum Defect { none, no_wait, no_commit, no_barrier, early_prefetch, no_syncwarp };

constexpr int num_threads = 128;

__device__ inline void copy_16(void *shared, const void *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)), "l"(global)
                 : "memory");
}

// Starts the copy of a tile, 16 bytes a thread.
__device__ inline void prefetch(float4 *tile, const float4 *source, bool commit) {
    copy_16(tile + threadIdx.x, source + threadIdx.x);
    if (commit) asm volatile("cp.async.commit_group;" ::: "memory");
}

// out[i] = the sum over all tiles of element (i + 32) % 128, which another warp copied.
template <Defect defect>
__device__ inline void pipeline(const float4 *in, float *out, int tiles) {
    __shared__ float4 tile[num_threads];
    tile[threadIdx.x] = float4{};
    __syncthreads();
    prefetch(tile, in, defect != no_commit);
    float sum = 0;
    for (int j = 0; j < tiles; ++j) {
        if (defect != no_wait) asm volatile("cp.async.wait_group 0;" ::: "memory");
        if (defect != no_barrier) __syncthreads();
        sum += tile[(threadIdx.x + 32) % num_threads].x;
        if (defect != early_prefetch) __syncthreads();
        if (j + 1 < tiles) prefetch(tile, in + (j + 1) * num_threads, true);
        if (defect == early_prefetch) __syncthreads();
    }
    out[blockIdx.x * num_threads + threadIdx.x] = sum;
}

#define PIPELINE(defect)                                                                                             \
    extern "C" __global__ void __launch_bounds__(num_threads) pipeline_##defect(const float4 *in, float *out, int n) { \
        pipeline<defect>(in, out, n);                                                                                \
    }
PIPELINE(none)
PIPELINE(no_wait)
PIPELINE(no_commit)
PIPELINE(no_barrier)
PIPELINE(early_prefetch)

// Neighbouring lanes of a warp swap values through shared memory.
template <Defect defect>
__device__ inline void swap(const float4 *in, float *out) {
    __shared__ float values[num_threads];
    values[threadIdx.x] = in[threadIdx.x].x;
    if (defect != no_syncwarp) __syncwarp();
    out[blockIdx.x * num_threads + threadIdx.x] = values[threadIdx.x ^ 1];
}
extern "C" __global__ void swap_none(const float4 *in, float *out, int) { swap<none>(in, out); }
extern "C" __global__ void swap_no_syncwarp(const float4 *in, float *out, int) { swap<no_syncwarp>(in, out); }

// An array that is indexed at run time lies in local memory.
extern "C" __global__ void local_array(const float4 *in, float *out, int n) {
    float history[8];
    for (int i = 0; i < 8; ++i) history[i] = in[threadIdx.x].x + i;
    for (int i = 0; i < n; ++i) history[(i * 3) % 8] += history[(i + threadIdx.x) % 8];
    out[blockIdx.x * num_threads + threadIdx.x] = history[n % 8];
}

// Functions that nvcc expands to many instructions.
extern "C" __global__ void mathematics(const float4 *in, float *out, int n) {
    const float x = in[threadIdx.x].x;
    const float y = expf(x) + logf(fabsf(x) + 0.1f) + tanhf(x) + __expf(x) + rsqrtf(x * x + 1.0f) + x / 3.0f + fmodf(x, 0.7f);
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    out[blockIdx.x * num_threads + threadIdx.x] = y + float(int(x * 100)) / (n + 5) + float(__hmul2(pair, pair).x);
}
