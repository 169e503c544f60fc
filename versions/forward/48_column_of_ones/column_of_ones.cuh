// Tiles of V with a column of ones: its product with P is the sum of P, so it is summed beside O, as P is rounded.
#pragma once
#include "ptx/sm90.cuh"
#include "softmax/sinks.cuh"
#include "tile/layout.cuh"
#include "tile/rows.cuh"

constexpr int ones_columns = 8;  // the fewest by which a product can be wider

// A tile that TMA loads, and a panel of ones behind its own. A product reads 8 of the panel's columns.
template <class Tile>
struct WithOnes : Tile {
    static constexpr int ones = Tile::size;  // where they begin
    static constexpr int size = Tile::size + Tile::rows * Tile::row_pitch;
};

// Writes the ones of all tiles. All threads of a CTA call it before the barrier behind which products begin.
template <class Tile, class T, int stages>
__device__ inline void write_ones(T (&tiles)[stages][Tile::size]) {
    const T one = static_cast<T>(1.0f);
    for (auto &tile : tiles)
        for (int i = Tile::ones + threadIdx.x; i < Tile::size; i += blockDim.x) tile[i] = one;
    fence_proxy_async();  // products see what each thread wrote
}

// O / (l * share), where l(h) is that of a row's keys. Newton's step makes an approximation as good as a division for these l,
// which are not near an end of fp32's range. Of a row that sees no key l is 0, and O is 0 whatever is in V. A sink joins l.
template <int columns, int wide, bool sinks, class Softmax, class Sum>
__device__ inline Accumulator<16, columns> divide_by(const Accumulator<16, wide> &o, Sum sum, const Softmax &softmax,
                                                     const Sink<sinks> &sink, float share = 1.0f) {
    Accumulator<16, columns> divided;
    each_row([&](int h) {
        const float of_keys = sum(h), l = sink.in_sum(of_keys, softmax.m_from_zero(h)) * share, near = reciprocal_approx(l);
        const float reciprocal = fmaf(near, -fmaf(l, near, -1.0f), near);
#pragma unroll
        for (int n = 0; n < columns / 8; ++n)
#pragma unroll
            for (int i = 2 * h; i < 2 * h + 2; ++i) divided.block[0][n][i] = of_keys == 0.0f ? 0.0f : o.block[0][n][i] * reciprocal;
    });
    return divided;
}

// O / l, where l is the last columns of O.
template <int wide, bool sinks, class Softmax>
__device__ inline auto divide_by_sums(const Accumulator<16, wide> &o, const Softmax &softmax, const Sink<sinks> &sink) {
    constexpr int columns = wide - ones_columns;
    return divide_by<columns>(o, [&](int h) { return o.block[0][columns / 8][2 * h]; }, softmax, sink);
}

// Columns from `col` on, of the rows that are wanted.
template <int cols, int some>
__device__ inline void take_rows(Accumulator<16, cols> &to, int col, const Accumulator<16, some> &from,
                                 const bool (&wanted)[2]) {
    each_row([&](int h) {
#pragma unroll
        for (int n = 0; n < some / 8; ++n)
#pragma unroll
            for (int i = 2 * h; i < 2 * h + 2; ++i)
                if (wanted[h]) to.block[0][col / 8 + n][i] = from.block[0][n][i];
    });
}
