// How CTAs tell each other that something has been done, through a counter in global memory. One function per instruction.
#pragma once

// Reads a counter. What was done before the additions that it has seen is there behind it.
__device__ inline unsigned load_acquire(const unsigned *counter) {
    unsigned value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}

// Adds to a counter, behind all that this thread has done or knows of.
__device__ inline void add_release(unsigned *counter, unsigned value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
