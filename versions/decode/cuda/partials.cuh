// What each part of the keys comes to, in memory, and how these are combined.
#pragma once
#include "splits.cuh"

// O of each part, as if there were no other keys, and its log-sum-exp: fp32, part by part.
struct Partials {
    float *o;
    float *lse;
};
FLASHLADDER_WORKSPACE(partial_o, float, "max(num_parts, num_splits * batch) * num_heads * seqlen_q * head_dim_v");
FLASHLADDER_WORKSPACE(partial_lse, float, "max(num_parts, num_splits * batch) * num_heads * seqlen_q");

// O of a row from its parts, by a warp: `slice` columns of it, from `first_col` on. Parts are weighted by their
// log-sum-exp, which is -inf of one without keys. They are added up in their order, whichever was ready first. Where no
// part has keys, the row's log-sum-exp is `of_no_key`. A sink joins the sum here, once, however many parts there are.
template <int head_dim_v = config::head_dim, int slice = head_dim_v>
__device__ inline void combine_parts(const SplitParams &params, Partials partials, Parts parts, int batch, int head,
                                     int row, int first_col = 0, float of_no_key = -INFINITY) {
    constexpr int columns = (slice + 63) / 64 * 2;  // of a lane, whole pairs
    constexpr int at_once = slice < head_dim_v ? 32 : 8;  // loads that are under way
    const bool has_columns = slice % 64 == 0 || lane_index() * columns < slice;
    const int column = has_columns ? first_col + lane_index() * columns : 0;
    const long long at = params.row_index(parts.first, head, row), apart = params.row_index(parts.apart, 0, 0);
    const float *lse = partials.lse + at;
    const float *part = partials.o + at * head_dim_v + column;

    float highest = -3.0e38f, sum = 0.0f, o[columns] = {};
    for (int split = lane_index(); split < parts.count; split += 32) highest = fmaxf(highest, lse[split * apart]);
    highest = warp_max(highest);
    for (int first = 0; first < parts.count; first += 32) {
        const int mine = first + lane_index();
        const float weight = mine < parts.count ? exp2_approx((lse[mine * apart] - highest) * log2_e) : 0.0f;
        sum += warp_sum(weight);
        const int count = min(32, parts.count - first);
#pragma unroll at_once
        for (int i = 0; i < count; ++i) {
            const float of_part = __shfl_sync(0xffffffff, weight, i);
#pragma unroll
            for (int c = 0; c < columns; c += 2) {
                const float2 two = *reinterpret_cast<const float2 *>(part + (first + i) * apart * head_dim_v + c);
                o[c] += of_part * two.x, o[c + 1] += of_part * two.y;
            }
        }
    }
    const auto sink = sink_of(params, head);
    const float whole = sink.in_sum(sum, highest * log2_e), inverse = whole > 0.0f ? 1.0f / whole : 0.0f;
    config::dtype *to = static_cast<config::dtype *>(params.o) + batch * params.o_stride.batch +
                        row * params.o_stride.row + head * params.o_stride.head + column;
#pragma unroll
    for (int c = 0; has_columns && c < columns; c += 2)
        *reinterpret_cast<uint32_t *>(to + c) = pack<config::dtype>(o[c] * inverse, o[c + 1] * inverse);
    if (params.lse != nullptr && lane_index() == 0 && first_col == 0)
        params.lse[params.row_index(batch, head, row)] =
            or_of_no_key(sink.in_natural_log(highest + __log2f(sum) * ln_2), of_no_key);
}
