// A CTA of warpgroups with roles: some consume tiles, the last one produces them.
#pragma once
#include "ptx/sm90.cuh"
#include "tile/warpgroup_gemm.cuh"

// How many registers a thread has. All are launched with the same number; then the producer releases what it does not
// need, and the consumers take it. setmaxnreg moves multiples of 8, 24 at least.
template <int consumers, int ctas_per_sm, int of_producer = 32>
struct Registers {
    static constexpr int num_threads = (consumers + 1) * warpgroup_threads;
    static constexpr int at_launch = 65536 / (num_threads * ctas_per_sm) / 8 * 8;
    static constexpr int producer = of_producer;
    static constexpr int left = (at_launch * (consumers + 1) - producer) / consumers / 8 * 8;
    static constexpr int consumer = left < 240 ? left : at_launch > 240 ? at_launch : 240;  // never fewer than there are
};
