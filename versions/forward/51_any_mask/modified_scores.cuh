// Scores as expressions change them, and minus infinity for the keys that a mask by an expression hides.
#pragma once
#include "softmax/expression.cuh"
#include "softmax/log2.cuh"
#include "softmax/terms.cuh"
#include "tile/fragment.cuh"

// Of a CTA's rows, with the expressions of `Mods`, which config.cuh has.
template <class Mods, bool has_mask, bool has_score, class Params, class Mask>
struct ModifiedScores {
    const Params &params;
    const Mask &mask;
    int batch, head;
    float unit = ln_2;  // of scores as they are held, in natural logarithms

    // For the CTA's work, which assigned() finds.
    template <class Assigned>
    __device__ ModifiedScores(const Params &params_, Assigned assigned, const Mask &mask_) : params(params_), mask(mask_) {
        if constexpr (has_mask || has_score) {
            const auto work = assigned();
            batch = work.batch, head = work.head;
        }
    }
    __device__ ModifiedScores(const Params &params_, int batch_, int head_, const Mask &mask_, float unit_)
        : params(params_), mask(mask_), batch(batch_), head(head_), unit(unit_) {}
    // S holds the scores of the rows from `first_row` on and the keys from `first_key` on. If `cut`, some rows may
    // not see all of these keys: then nothing is evaluated there. Rows behind the last one are evaluated as that one. If not
    // `hides`, the mask shows all of them. Scores that an expression gives are in log2.
    template <bool cut, bool hides = has_mask, int rows, int cols>
    __device__ void apply(Accumulator<rows, cols> &s, int first_row, int first_key) const {
        constexpr bool by_terms = hides && Mods::has_terms, by_element = hides && !by_terms;
        if constexpr (by_element || has_score) {
            const int before = mask.shift - 1;  // keys before the first row's own
            Place at{batch, head, 0, 0, mask.seqlen_k - before, mask.seqlen_k};
#pragma unroll
            for (int b = 0; b < rows / 16; ++b)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int row = first_row + b * 16 + h * 8 + accumulator_row();
                    const int begin = mask.first(row), end = mask.keys(row);
                    at.q = min(row + before, mask.seqlen_k - 1);
#pragma unroll
                    for (int n = 0; n < cols / 8; ++n)
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            at.k = first_key + accumulator_col() + n * 8 + i;
                            if (cut && (at.k < begin || at.k >= end)) continue;
                            float &x = s.block[b][n][2 * h + i];
                            if constexpr (has_score) x = Mods::score(params, at, x * unit) * log2_e;
                            if constexpr (by_element) x = Mods::mask(params, at) ? x : -INFINITY;
                        }
                }
        }
        if constexpr (by_terms) hide<cut>(s, first_row, first_key);
    }

  private:
    // The mask alone, where its text has terms of a key or of a row: a warp evaluates these once, a key a lane.
    template <bool cut, int rows, int cols>
    __device__ void hide(Accumulator<rows, cols> &s, int first_row, int first_key) const {
        constexpr int num_rows = rows / 8;  // of a thread
        const int before = mask.shift - 1;
        Place at{batch, head, 0, 0, mask.seqlen_k - before, mask.seqlen_k};
        int q[num_rows], begin[num_rows], end[num_rows];  // a row sees the keys from `begin` up to `end`
        typename Mods::OfRow of_row[num_rows]{};
#pragma unroll
        for (int r = 0; r < num_rows; ++r) {
            const int row = first_row + r * 8 + accumulator_row();
            begin[r] = mask.first(row), end[r] = mask.keys(row);
            at.q = q[r] = min(row + before, mask.seqlen_k - 1);
            if (!cut || begin[r] < end[r]) of_row[r] = Mods::of_row(params, at);
        }
        // Of keys that none of the rows sees no element is read.
        const int lowest = mask.first(first_row), keys = mask.keys(min(first_row + rows, at.seqlen_q) - 1);
        const ColumnTerms<typename Mods::OfKey, cols> of_keys([&](int col) {
            at.k = first_key + col;
            return !cut || (at.k >= lowest && at.k < keys) ? Mods::of_key(params, at) : typename Mods::OfKey{};
        });
#pragma unroll
        for (int n = 0; n < cols / 8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const auto of_key = of_keys.at(n, i);
                at.k = first_key + accumulator_col() + n * 8 + i;
#pragma unroll
                for (int r = 0; r < num_rows; ++r) {
                    if (cut && (at.k < begin[r] || at.k >= end[r])) continue;
                    at.q = q[r];
                    if (!Mods::mask(params, at, of_key, of_row[r])) s.block[r / 2][n][r % 2 * 2 + i] = -INFINITY;
                }
            }
    }
};
