// Caches in 8-bit floats: where the scales are by which the numbers of a head's K or V are multiplied.
#pragma once
#include "pages.cuh"

// (batch, num_heads_k) each; or one for the tensor, or (num_pages, num_heads_k).
template <class Params>
struct Scaled : Params {
    const float *k_descale, *v_descale;
    FLASHLADDER_FURTHER_FIELDS(Params, k_descale, v_descale)

    __device__ int scale_at(int sequence, int page, int head_k) const {
        if constexpr (config::tensor_scales) return 0;
        return (config::page_scales ? page : sequence) * Params::num_heads_k + head_k;
    }
};
