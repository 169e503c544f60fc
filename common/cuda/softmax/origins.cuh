// Scores that lie far from 0, of a warp's rows.
#pragma once
#include "ptx/sm90.cuh"
#include "tile/rows.cuh"

// 2^(scale * S - m) by one fused multiply-add is as wrong as m is rounded, which beyond 2^24 is a unit and more. So a row
// whose scores begin far from 0 counts them from the first maximum: near it their difference is exact. Other rows count from 0.
struct Origins {
    static constexpr float far = 0x1p23f;  // of a maximum, in log2: m may rise as much again
    float of_row[2];                       // unscaled
    bool exist;                            // in some row of the warp

    __device__ void clear() {
        of_row[0] = of_row[1] = 0.0f;
        exist = false;
    }
    // That of a row with this maximum. Returns the maximum as it counts from there, in log2.
    __device__ float begin(int h, float highest, float scale) {
        const bool is_far = fabsf(highest * scale) >= far && fabsf(highest) < INFINITY;
        of_row[h] = is_far ? highest : 0.0f;
        return (highest - of_row[h]) * scale;
    }
    // To be called once rows have begun.
    __device__ void look() { exist = __any_sync(0xffffffff, of_row[0] != 0.0f || of_row[1] != 0.0f); }

    template <int cols>
    __device__ void subtract_from(Accumulator<16, cols> &s) const {
        if (exist) each_row([&](int h) { each_element(s, h, [&](float &x) { x -= of_row[h]; }); });
    }
    // What counts from a row's origin, in log2, as it counts from 0.
    __device__ float from_zero(int h, float value, float scale) const { return fmaf(of_row[h], scale, value); }
};
