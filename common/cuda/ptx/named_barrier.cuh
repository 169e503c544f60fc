// Barriers of some warps of a CTA. Number 0 is __syncthreads.
#pragma once

// Arrives, and waits for the others.
__device__ inline void named_barrier_sync(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Arrives there for those that wait, and goes on.
__device__ inline void named_barrier_arrive(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
