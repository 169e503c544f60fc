// The parts of sequences, for a kernel that combines them.
#pragma once
#include "equal_parts.cuh"
#include "partials.cuh"

template <int block_n>
__device__ inline Parts parts_of_sequence(const SplitParams &params, int sequence) {
    return scan_parts<block_n>(params, [&](int first, int, int) { return sequence - first; }).all();
}

// All sequences of more than one part, in their order: visit(sequence, parts).
template <int block_n, bool at_most, class Visit>
__device__ inline void each_cut_sequence(const SplitParams &params, Visit visit) {
    scan_parts<block_n, at_most>(params, [&](int first, int count, int end) {
        unsigned cut = __ballot_sync(0xffffffff, count > 1);
        for (int lane = 0; cut; ++lane, cut >>= 1) {
            const int parts = __shfl_sync(0xffffffff, count, lane), next = __shfl_sync(0xffffffff, end, lane);
            if (cut & 1) visit(first + lane, Parts{next - parts, 1, parts});
        }
        return 32;  // go on
    });
}
