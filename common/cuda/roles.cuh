// A CTA of warpgroups with roles: some consume tiles, the last one produces them.
#pragma once
#include "ptx_async.cuh"
#include "wgmma.cuh"

// How many registers a thread has. All are launched with the same number; then the producer gives back what it does not
// need, and the consumers take it. setmaxnreg moves multiples of 8, 24 at least.
template <int consumers, int ctas_per_sm>
struct Registers {
    static constexpr int num_threads = (consumers + 1) * warpgroup_threads;
    static constexpr int at_launch = 65536 / (num_threads * ctas_per_sm) / 8 * 8;
    static constexpr int producer = 32;
    static constexpr int left = (at_launch * (consumers + 1) - producer) / consumers / 8 * 8;
    static constexpr int consumer = left < 240 ? left : 240;
};

// Consumers take turns in starting their products, so that one computes its softmax while the others' products run. The
// barrier of a consumer opens when he waits for his turn and the one before him has passed it on.
template <int consumers>
struct Turn {
    int own;

    __device__ explicit Turn(int own_) : own(own_) {
        if (own == consumers - 1) pass();  // number 0 begins
    }
    __device__ void wait() const { named_barrier_sync(1 + own, 2 * warpgroup_threads); }
    __device__ void pass() const { named_barrier_arrive(1 + (own + 1) % consumers, 2 * warpgroup_threads); }
};
