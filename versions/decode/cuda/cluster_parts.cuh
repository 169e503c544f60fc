// The CTAs of a cluster have parts of the same rows' keys. Each CTA reads what the others' parts come to.
#pragma once
#include "config.cuh"
#include "packed_rows.cuh"
#include "ptx/cluster.cuh"
#include "warp_sums.cuh"

// O of a CTA's part, as if there were no other keys, and its log-sum-exp. With 8 columns more, the rows of a fragment begin
// in other banks.
template <int rows, int cols, int more_cols = 0>
struct PartOfRows {
    float o[rows][cols + more_cols];
    float lse[rows];
};

// Adds up the parts of a tile's rows, in the order of the ranks, and stores O and the log-sum-exp. The cluster has met; the
// warps of all its CTAs share the work, 4 columns a lane: those of its first threads. The log-sum-exp of a row without keys is
// `of_no_key`.
template <int ctas, class Params, int rows, int cols, int more_cols>
__device__ inline void combine_cluster(const Params &params, const PackedRows<rows> &tile,
                                       const PartOfRows<rows, cols, more_cols> &part, int threads = blockDim.x,
                                       float of_no_key = -INFINITY) {
    const int first = (warp_index() * ctas + cluster_rank()) * 32 + lane_index();
    for (int i = first * 4; i < (tile.last() + 1) * cols; i += threads * ctas * 4) {
        const int row = i / cols, col = i % cols;
        float lse[ctas], highest = -3.0e38f, sum = 0.0f;
#pragma unroll
        for (int cta = 0; cta < ctas; ++cta) lse[cta] = load_cluster_4(in_cta(shared_address(&part.lse[row]), cta));
#pragma unroll
        for (int cta = 0; cta < ctas; ++cta) highest = fmaxf(highest, lse[cta]);
        float4 o = {};
#pragma unroll
        for (int cta = 0; cta < ctas; ++cta) {
            const float weight = exp2_approx((lse[cta] - highest) * log2_e);
            const float4 of_part = load_cluster_16(in_cta(shared_address(&part.o[row][col]), cta));
            sum += weight;
            o.x += weight * of_part.x, o.y += weight * of_part.y, o.z += weight * of_part.z, o.w += weight * of_part.w;
        }
        const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
        o.x *= inverse, o.y *= inverse, o.z *= inverse, o.w *= inverse;
        store_columns<config::dtype>(params, tile, row, col, o, or_of_no_key(highest + __log2f(sum) * ln_2, of_no_key));
    }
}
