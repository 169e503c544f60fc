// When the CTAs of the kernel that combines parts may take their places.
#pragma once
#include "decode/cuda/equal_parts.cuh"
#include "ptx/griddepcontrol.cuh"

constexpr int few_parts = 66;  // on as many SMs; others are free

// Lets them start early where that leaves half of the SMs for them. Where parts fill the GPU they would all wait on the few SMs
// that are free, and do most of their work there. The end of each CTA of a part lets them start, too: then on all SMs. They start
// when all CTAs have let them, and those of the last sequence know how many parts there are.
__device__ inline void launch_where_room(const Part &part, int num_heads_k) {
    if (static_cast<int>(gridDim.x) * num_heads_k * (part.first + part.count) <= few_parts) launch_dependents();
}
