// Gradients of the tensors that a score reads: sums of dS, before the score, times its slope over an element.
#pragma once
#include "softmax/expression.cuh"
#include "tile/layout.cuh"

// What a thread adds to them, with the expressions of `Mods`. Elements that all scores of a head share are summed by the
// thread first, then by its warp: else all scores would wait for one address.
template <class Mods>
struct SlopeSums {
    float shared[Mods::num_shared + 1] = {};

    // Of the score at a place, before the expression and its gradient behind it.
    template <class Params>
    __device__ void add(const Params &params, const Place &at, float s, float ds) {
        Mods::each_slope(params, at, s, [&](int number, float *sums, long long element, long long count, float slope) {
            if (slope == 0.0f) return;  // the element may be one that is not read there
            if (number >= 0)
                shared[number] += ds * slope;
            else
                add_within(sums, element, count, ds * slope);
        });
    }

    // By whole warps, once they have gone through all scores of the head at `at`.
    template <class Params>
    __device__ void finish(const Params &params, const Place &at) const {
        Mods::each_slope(params, at, 0.0f, [&](int number, float *sums, long long element, long long count, float) {
            if (number < 0) return;
            float sum = shared[number];
#pragma unroll
            for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffff, sum, other);
            if (lane_index() == 0 && sum != 0.0f) add_within(sums, element, count, sum);
        });
    }

  private:
    __device__ static void add_within(float *sums, long long element, long long count, float x) {
        if (element >= 0 && element < count) atomicAdd(sums + element, x);
    }
};

// Zeros for a thread's part of them.
template <class Mods, class Params>
__device__ inline void clear_gradients(const Params &params) {
    const long long cta = blockIdx.x + static_cast<long long>(gridDim.x) * (blockIdx.y + gridDim.y * blockIdx.z);
    const long long threads = static_cast<long long>(gridDim.x) * gridDim.y * gridDim.z * blockDim.x;
    Mods::each_gradient(params, [&](float *sums, long long count) {
        for (long long i = cta * blockDim.x + threadIdx.x; i < count; i += threads) sums[i] = 0.0f;
    });
}
