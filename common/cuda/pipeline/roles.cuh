// A CTA of warpgroups with roles: some consume tiles, the next one produces them. Others may help.
#pragma once
#include "ptx/sm90.cuh"
#include "tile/warpgroup_gemm.cuh"

// How many registers a thread has. All are launched with the same number; then the producer releases what it does not
// need, and the consumers take it. setmaxnreg moves multiples of 8, 24 at least.
template <int consumers, int ctas_per_sm, int of_producer = 32, int helpers = 0, int of_helper = 0>
struct Registers {
    static constexpr int warpgroups = consumers + 1 + helpers;
    static constexpr int num_threads = warpgroups * warpgroup_threads;
    static constexpr int at_launch = 65536 / (num_threads * ctas_per_sm) / 8 * 8;
    static constexpr int producer = of_producer, helper = of_helper;
    static constexpr int left = (at_launch * warpgroups - producer - helpers * helper) / consumers / 8 * 8;
    static constexpr int consumer = left < 240 ? left : (at_launch > 240 ? at_launch : 240);  // never fewer than there are
};
