// From the products of a warp to P, where expressions say what a score becomes and which keys a row sees.
#pragma once
#include "any_score.cuh"
#include "softmax/dropout.cuh"
#include "softmax/expression.cuh"

// Of a head of a sequence, with the expressions of `Mods`, which config.cuh has.
template <class Mods, bool has_mask, bool has_score, bool softcap, bool alibi, class Params, class Mask>
struct ModifiedWeights {
    const Params &params;
    const Mask &mask;
    int batch, head;
    float unit, slope;  // what a score behind the softcap counts in log2, and loses for each key by ALiBi

    // P^T of S^T behind the softcap, rounded, of the keys from `first_key` on and the rows from `first_row` on, whose LSE `lse`
    // has. `scored` becomes what dP is to be multiplied by: P^T times the derivatives of the score and of the softcap.
    template <class T, int keys, int rows>
    __device__ void exponentiate(Accumulator<keys, rows> &scored, const float *lse, int first_key, int first_row,
                                 HeldA<keys, rows> &weights) const {
        float pair[2];  // of two neighbours, which are rounded together
        each(scored, lse, first_key, first_row, [&](int m, int n, int i, const Place &at, float s, float p) {
            pair[i % 2] = p;
            if (p != 0.0f) {  // else its score may be infinite, and have no slope
                const float tanh = scored.block[m][n][i];
                if constexpr (softcap) p *= fmaxf(1.0f - tanh * tanh, 0.0f);
                if constexpr (has_score) p *= Mods::slope(params, at, s);
            }
            scored.block[m][n][i] = p;
            if (i % 2 == 1) weights.block[n / 2][m][n % 2 * 2 + i / 2] = pack<T>(pair[0], pair[1]);
        });
    }

    // Visits all scores in their order: visit(m, n, i, at, s, p), where s is what the expression takes, and p the weight. That
    // is 0 of a key that the row does not see, for which nothing is evaluated.
    template <int keys, int rows, class Visit>
    __device__ void each(const Accumulator<keys, rows> &scored, const float *lse, int first_key, int first_row, Visit visit) const {
        if (mask.shows_all(first_key, keys, first_row, rows))
            each_that<false>(scored, lse, first_key, first_row, visit);
        else
            each_that<true>(scored, lse, first_key, first_row, visit);
    }

  private:
    template <bool may_hide, int keys, int rows, class Visit>
    __device__ void each_that(const Accumulator<keys, rows> &scored, const float *lse, int first_key, int first_row, Visit visit) const {
        Place at{batch, head, 0, 0, mask.nobody, mask.seqlen_k};
#pragma unroll
        for (int n = 0; n < rows / 8; ++n)
#pragma unroll
            for (int m = 0; m < keys / 16; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int in_tile = n * 8 + accumulator_col() + i % 2, row = first_row + in_tile;
                    at.q = row + mask.shift, at.k = first_key + m * 16 + i / 2 * 8 + accumulator_row();
                    float s = 0.0f, p = 0.0f;
                    if ((!may_hide || mask.shows(at.k, row)) && (!has_mask || Mods::mask(params, at)))
                        p = weight(scored.block[m][n][i], lse[in_tile], at, s);
                    visit(m, n, i, at, s, p);
                }
    }

    // P of a score behind the softcap; s is what the expression takes.
    __device__ float weight(float scored, float lse, const Place &at, float &s) const {
        float x = unit * scored;
        if constexpr (alibi) x -= slope * fabsf(at.q - at.k);
        s = x * ln_2;
        if constexpr (has_score) x = Mods::score(params, at, s) * log2_e;
        x -= lse;
        return exp2_approx(x > 0.0f ? 0.0f : x);  // a large LSE may be rounded by some log2
    }
};

// dP^T - delta, where dP of what is dropped is 0: P is weighed later, by what is negative where a score falls, so its sign
// tells nothing. `delta` is that of the first row of Q, which is a column here.
template <bool dropout, int keys, int rows>
__device__ inline void drop_and_subtract(const Dropout<dropout> &dropping, Accumulator<keys, rows> &gradients,
                                         const float *delta, int first_row, int first_key) {
    dropping.template each_pair<true, keys, rows>(first_row, first_key, [&](int step, int m, int i, uint32_t mask) {
        float (&of)[4] = gradients.block[m][step * 2 + i / 2];
        const int col = step * 16 + i / 2 * 8 + accumulator_col();
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            float &x = of[i % 2 * 2 + n];
            x = (mask >> 16 * n & 1 ? dropping.rescale * x : 0.0f) - delta[col + n];
        }
    });
}
