// From the scores of a step to P, and from dP to dS.
#pragma once
#include "any_score.cuh"
#include "warpgroup_tiles.cuh"

struct AsIs {
    __device__ float operator()(float x) const { return x; }
};

// S^T becomes what dP^T - delta is multiplied by: P^T = 2^(score - lse), with a softcap times the softcap's derivative,
// 1 - tanh^2; only then `p` is set, to P^T. `of_score` of S^T are the scores behind the softcap, which count `unit` each in log2; a hidden key's
// is minus infinity. `ahead` keys are between the first key and the first row's own, and a score loses `slope` for each.
template <class T, bool softcap, bool alibi, class Of = AsIs>
__device__ inline void weights(Scores &s, ScoresOperand &p, const float *lse, float unit, float slope, int ahead,
                               const Of &of_score = {}) {
    const float lane_ahead = ahead + accumulator_col() - accumulator_row();
#pragma unroll
    for (int n = 0; n < step_rows / 8; ++n) {
        const float2 of_row = *reinterpret_cast<const float2 *>(lse + n * 8 + accumulator_col());
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float of[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float &x = s.block[0][n][2 * h + i];
                const float tanh = of_score(x);
                float lost = i ? of_row.y : of_row.x;
                if (alibi) lost += slope * fabsf(lane_ahead + (n * 8 + i - h * 8));
                of[i] = exp2_approx(unit * tanh - lost);
                x = softcap ? of[i] * __saturatef(fmaf(-tanh, tanh, 1.0f)) : of[i];  // 0, not -inf, of a hidden key
            }
            if (softcap) p.block[n / 2][0][n % 2 * 2 + h] = pack<T>(of[0], of[1]);
        }
    }
}

// dS^T = W * (rescale * dP^T - delta), in the place of dP^T
__device__ inline void weigh_gradients(Scores &dp, const Scores &w, const float *delta, float rescale) {
    each_row_of_q(dp, delta, [&](float &gradient, float row_delta) { gradient = rescale * gradient - row_delta; });
#pragma unroll
    for (int n = 0; n < step_rows / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) dp.block[0][n][i] *= w.block[0][n][i];
}
