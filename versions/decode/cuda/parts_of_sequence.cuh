// The parts of a sequence, for a kernel that combines them.
#pragma once
#include "equal_parts.cuh"
#include "partials.cuh"

template <int block_n>
__device__ inline Parts parts_of_sequence(const SplitParams &params, int sequence) {
    return scan_parts<block_n>(params, [&](int first, int) { return sequence - first; }).all();
}
