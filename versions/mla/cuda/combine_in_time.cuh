// When the CTAs of the kernel that combines parts may take their places.
#pragma once
#include "decode/cuda/equal_parts.cuh"
#include "ptx/griddepcontrol.cuh"

constexpr int few_parts = 66;  // on as many SMs; others are free

// Lets them start early, unless the parts of one sequence fill the GPU. Its rows need few CTAs that combine, which would all wait
// on the few SMs that are free, and do their work there. The end of each CTA of a part lets them start, too: then on all SMs. Of
// several sequences there are more such CTAs than those SMs hold.
template <class Params>
__device__ inline void launch_where_room(const Params &params, const Part &part) {
    if (params.batch > 1 || static_cast<int>(gridDim.x) * params.num_heads_k * part.count <= few_parts) launch_dependents();
}
