// The warps of a CTA have the same rows and other keys. Here their sums become one.
#pragma once
#include "decode_softmax.cuh"
#include "packed_rows.cuh"

// Writes the lane's columns of row h of O.
template <int cols>
__device__ inline void put_two_columns(const Accumulator<16, cols> &o, int h, float *row) {
#pragma unroll
    for (int n = 0; n < cols / 8; ++n)
        *reinterpret_cast<float2 *>(row + n * 8 + accumulator_col()) =
            make_float2(o.block[0][n][2 * h], o.block[0][n][2 * h + 1]);
}

template <int warps, int rows, int cols>
struct WarpSums {
    float m[warps][rows], l[warps][rows];
    float o[warps][rows][cols + 8];  // 8 more, so that the rows of a fragment begin in other banks

    // A warp's own. `put_columns(h, row)` writes the lane's columns of its row h.
    template <class PutColumns>
    __device__ void put(int warp, const DecodeSoftmax &softmax, PutColumns put_columns) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = h * 8 + accumulator_row();
            const float whole = quad_sum(softmax.l[0][h]);
            if (lane_index() % 4 == 0) m[warp][row] = softmax.m[0][h], l[warp][row] = whole;
            put_columns(h, o[warp][row]);
        }
    }
    __device__ void put(int warp, const DecodeSoftmax &softmax, const Accumulator<rows, cols> &sum) {
        put(warp, softmax, [&](int h, float *row) { put_two_columns(sum, h, row); });
    }

    // O of all keys, and the log-sum-exp, in natural logarithms: store(row, first column, four columns of O, lse). A row
    // that sees no key has 0 and -inf. All warps have put their sums, and a barrier has been.
    template <class Store>
    __device__ void merge(Store store) const {
        for (int i = threadIdx.x * 4; i < rows * cols; i += warps * 32 * 4) {
            const int row = i / cols, col = i % cols;
            float highest = m[0][row], sum_l = 0.0f;
#pragma unroll
            for (int w = 1; w < warps; ++w) highest = fmaxf(highest, m[w][row]);
            float4 sum = {};
#pragma unroll
            for (int w = 0; w < warps; ++w) {
                const float factor = exp2_approx(m[w][row] - highest);
                const float4 part = *reinterpret_cast<const float4 *>(&o[w][row][col]);
                sum_l += factor * l[w][row];
                sum.x += factor * part.x, sum.y += factor * part.y, sum.z += factor * part.z, sum.w += factor * part.w;
            }
            const float inverse = sum_l > 0.0f ? 1.0f / sum_l : 0.0f;
            sum.x *= inverse, sum.y *= inverse, sum.z *= inverse, sum.w *= inverse;
            store(row, col, sum, (highest + __log2f(sum_l)) * ln_2);
        }
    }
};

// Four columns of O, rounded.
template <class T>
__device__ inline void store_rounded(T *to, float4 o) {
    *reinterpret_cast<uint2 *>(to) = make_uint2(pack<T>(o.x, o.y), pack<T>(o.z, o.w));
}

// Four columns of O of packed row i, whose keys are all in it, and with the first ones its log-sum-exp; with its sink.
template <class T, class Params, int rows>
__device__ inline void store_columns(const Params &params, const PackedRows<rows> &tile, int i, int col, float4 o,
                                     float lse) {
    if constexpr (config::sinks) {
        const auto sink = sink_of(params, tile.head(i));
        const float share = sink.share(lse * log2_e);
        o.x *= share, o.y *= share, o.z *= share, o.w *= share;
        lse = sink.in_natural_log(lse);
    }
    store_rounded(tile.template element<T>(params.o, params.o_stride, i) + col, o);
    if (params.lse != nullptr && col == 0) params.lse[params.row_index(tile.batch, tile.head(i), tile.row(i))] = lse;
}
