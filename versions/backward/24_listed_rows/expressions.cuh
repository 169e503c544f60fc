// A mask and a score that are expressions, on the scores of a step.
#pragma once
#include "softmax/expression.cuh"
#include "softmax/terms.cuh"
#include "weights.cuh"

// Of a head of a sequence, with the expressions of `Mods`, which config.cuh has.
template <class Mods, bool has_mask, bool softcap, bool alibi, class Params, class Mask>
struct StepExpressions {
    const Params &params;
    const Mask &mask;
    int batch, head;

    // Scores that the mask hides become minus infinity. What `causal`, a window or a length hides is not evaluated.
    __device__ void hide(Scores &s, int first_key, int first_row) const {
        if constexpr (has_mask && Mods::has_terms) return hide_by_terms(s, first_key, first_row);
        each(first_key, first_row, [&](int n, int i, const Place &at) {
            if (!mask.shows(at.k, at.q - mask.shift) || (has_mask && !Mods::mask(params, at))) s.block[0][n][i] = -INFINITY;
        });
    }

    // As `weights`, where S^T is what the score's expression takes, behind the softcap and ALiBi. `slopes` says whether its
    // slope may be another than 1.
    template <class T, bool slopes>
    __device__ void weigh(Scores &s, ScoresOperand &p, const float *lse, float unit, float slope, int first_key, int first_row) const {
        float of[2];
        each(first_key, first_row, [&](int n, int i, const Place &at) {
            float &x = s.block[0][n][i], pull = 0.0f, &weight = of[i % 2];
            weight = 0.0f;
            if (x != -INFINITY) {  // of a hidden key nothing is evaluated
                float y = unit * x;
                if (alibi) y -= slope * fabsf(at.q - at.k);
                const float taken = y * ln_2;
                y = Mods::score(params, at, taken) * log2_e - lse[n * 8 + accumulator_col() + i % 2];
                pull = weight = exp2_approx(y > 0.0f ? 0.0f : y);  // a large LSE may be rounded by some log2
                if (weight != 0.0f) {  // else the score may be infinite, and have no slope
                    if constexpr (softcap) pull *= fmaxf(1.0f - x * x, 0.0f);
                    if constexpr (slopes) pull *= Mods::slope(params, at, taken);
                }
            }
            x = pull;
            if constexpr (softcap || slopes)
                if (i % 2) p.block[n / 2][0][n % 2 * 2 + i / 2] = pack<T>(of[0], of[1]);
        });
    }

  private:
    // Where the mask's text has terms of a key or of a row: a warp evaluates these once, a row a lane. Of a key or a row that
    // sees nothing no element is read.
    __device__ void hide_by_terms(Scores &s, int first_key, int first_row) const {
        Place at{batch, head, 0, 0, mask.nobody, mask.seqlen_k};
        typename Mods::OfKey of_key[2]{};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            at.k = first_key + h * 8 + accumulator_row();
            if (mask.shows(at.k, mask.first_row(at.k))) of_key[h] = Mods::of_key(params, at);
        }
        const ColumnTerms<typename Mods::OfRow, step_rows> of_rows([&](int col) {
            const int row = first_row + col;
            at.q = row + mask.shift;
            return mask.shows(mask.first_key(row), row) ? Mods::of_row(params, at) : typename Mods::OfRow{};
        });
        typename Mods::OfRow of_row[2];
        each(first_key, first_row, [&](int n, int i, const Place &at) {
            if (i < 2) of_row[i] = of_rows.at(n, i);  // of both keys
            if (!mask.shows(at.k, at.q - mask.shift) || !Mods::mask(params, at, of_key[i / 2], of_row[i % 2])) s.block[0][n][i] = -INFINITY;
        });
    }

    template <class Visit>
    __device__ void each(int first_key, int first_row, Visit visit) const {
        Place at{batch, head, 0, 0, mask.nobody, mask.seqlen_k};
#pragma unroll
        for (int n = 0; n < step_rows / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                at.q = first_row + n * 8 + accumulator_col() + i % 2 + mask.shift;
                at.k = first_key + i / 2 * 8 + accumulator_row();
                visit(n, i, at);
            }
    }
};
