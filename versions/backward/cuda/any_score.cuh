// From the products of a warp to P: with a softcap, ALiBi, or neither.
#pragma once
#include "24_woven_general/alibi.cuh"
#include "softmax/softcap.cuh"
#include "tile/fragment.cuh"

// ALiBi's slope of a head, in log2; 0 without ALiBi.
template <bool alibi, class Params>
__device__ inline float alibi_slope(const Params &p, int batch, int head) {
    if constexpr (alibi) return p.alibi_slopes[batch * p.num_heads + head] * log2_e;
    return 0.0f;
}

// P^T = 2^(score - lse) of S^T, where lse is of the rows of Q from the tile's first one on. A hidden key's score is minus
// infinity. `scored` has the scores behind the softcap, which count `unit` each in log2. `ahead` keys are between the first
// key and the first row's own, and a score loses `slope` for each.
//
// `scored` becomes what dP is to be multiplied by, in fp32: with a softcap that is P^T times the softcap's derivative, 1 - tanh^2.
// P^T comes back, rounded.
template <class T, bool softcap, bool alibi, int keys, int rows>
__device__ inline HeldA<keys, rows> exponentiate(Accumulator<keys, rows> &scored, const float *lse, float unit, float slope,
                                                 int ahead) {
    HeldA<keys, rows> p;
    const float lane_ahead = ahead + accumulator_col() - accumulator_row();
#pragma unroll
    for (int n = 0; n < rows / 8; ++n) {
        const float2 of_row = *reinterpret_cast<const float2 *>(lse + n * 8 + accumulator_col());
#pragma unroll
        for (int m = 0; m < keys / 16; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float of[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float &x = scored.block[m][n][2 * h + i];
                    const float tanh = x;
                    float lost = i ? of_row.y : of_row.x;
                    if (alibi) lost += slope * fabsf(lane_ahead + (n * 8 + i - m * 16 - h * 8));
                    of[i] = exp2_approx(unit * x - lost);
                    x = softcap ? of[i] * fmaxf(1.0f - tanh * tanh, 0.0f) : of[i];  // 0, not -inf, of a hidden key
                }
                p.block[n / 2][m][n % 2 * 2 + h] = pack<T>(of[0], of[1]);
            }
    }
    return p;
}
