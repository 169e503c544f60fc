// Scores with ALiBi: each loses a slope for each key between its own and that of its row (Press et al., arXiv:2108.12409).
#pragma once
#include "24_woven_general/alibi.cuh"
#include "48_column_of_ones/drawn_mask.cuh"
#include "48_column_of_ones/lagging_softmax.cuh"
#include "near_softcap.cuh"
#include "softmax/softcap.cuh"

#include <type_traits>

// What the softmax adds to scores of keys that come before their rows' own: it grows from key to key.
struct Line {
    float slope;  // in log2
    float first;  // of the lane's first row: the lane's first key, counted from the row's own

    __device__ float begin(int h, float minus_m) const { return fmaf(slope, first - h * 8, minus_m); }
    __device__ float at(float begun, int col) const { return fmaf(slope, col, begun); }
};

// Scores as Softcap has them, and the slope of a head. Without ALiBi it is no more than that.
template <bool softcap, bool alibi, bool polynomial_tanh = false,
          class Capped = std::conditional_t<polynomial_tanh, NearSoftcap, Softcap<softcap>>>
struct SlopingScores : Capped {
    float slope;  // in log2
    int shift;    // from a row to its own key

    template <class Params>
    __device__ explicit SlopingScores(const Params &params) : Capped(params) {}

    // The softcap for the softmax, or nothing.
    template <bool by_softmax>
    __device__ auto cap() const {
        if constexpr (by_softmax)
            return static_cast<const Capped &>(*this);
        else
            return NoCap();
    }
    // Of the head of a work tile, whose mask it is.
    template <class Params, class Mask>
    __device__ void take(const Params &params, const WorkTileReader &work, const Mask &mask) {
        if constexpr (alibi) {
            const int at = sequence_of(params, work) * params.num_heads + work.get(&WorkTile::head);
            slope = params.alibi_slopes[at] * log2_e;
            shift = mask.shift - 1;
        }
    }
    // To S, in place: of the rows from `first_row` on and the keys from `first_key` on.
    template <int cols>
    __device__ void add_slope(Accumulator<16, cols> &s, int first_row, int first_key) const {
        if constexpr (alibi) {
            const float unscaled = slope / this->scale, before = -first_of_lane(first_row, first_key);
            each_row([&](int h) {
                int done = 0;
                each_element(s, h, [&](float &x) {
                    x -= unscaled * fabsf(before + (h * 8 - (done / 2 * 8 + done % 2)));
                    ++done;
                });
            });
        }
    }
    // The same for the softmax, where all keys come before the rows' own, if they are `in_line`.
    template <bool in_line>
    __device__ auto line(int first_row, int first_key) const {
        if constexpr (alibi && in_line)
            return Line{slope, first_of_lane(first_row, first_key)};
        else
            return NoLine();
    }

  private:
    __device__ float first_of_lane(int first_row, int first_key) const {
        return first_key + accumulator_col() - first_row - accumulator_row() - shift;
    }
};
