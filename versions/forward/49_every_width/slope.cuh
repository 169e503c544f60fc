// Scores with ALiBi: each loses a slope for each key between its own and that of its row (Press et al., arXiv:2108.12409).
#pragma once
#include "24_woven_general/alibi.cuh"
#include "48_column_of_ones/drawn_mask.cuh"
#include "48_column_of_ones/lagging_softmax.cuh"
#include "near_softcap.cuh"
#include "softmax/softcap.cuh"
#include "tile/warpgroup_gemm.cuh"

#include <type_traits>

// What the softmax adds to scores of keys that come before their rows' own: it grows from key to key. If it grows by a product,
// scores have that of a key's place in its block already.
template <bool by_product = false>
struct Line {
    float slope;  // in log2
    float first;  // of the lane's first row: the lane's first key, or the block's, counted from the row's own

    __device__ float begin(int h, float minus_m) const { return fmaf(slope, first - h * 8, minus_m); }
    __device__ float at(float begun, int col) const { return by_product ? begun : fmaf(slope, col, begun); }
};

// Growing lines as a product: a slope, unscaled, in three parts of bf16, times the numbers of a block's keys, which bf16 has up
// to 256.
template <int keys>
struct KeyNumbers {
    static_assert(keys <= 256, "bf16 has whole numbers up to 256");
    using Tile = SwizzledPanels<keys, 64>;
    using A = HeldA<16, 16>;

    // All threads of a CTA call it before the barrier behind which products begin.
    template <class T>
    __device__ static void write(T *tile) {
        for (int i = threadIdx.x; i < Tile::size; i += blockDim.x)
            tile[Tile::offset(i / 64, i % 64)] = static_cast<T>(i % 64 < 3 ? static_cast<float>(i / 64) : 0.0f);
        fence_proxy_async();  // products see what each thread wrote
    }
    __device__ static A parts(float slope) {
        float part[4];
        for (float &x : part) {
            x = __bfloat162float(__float2bfloat16_rn(slope));
            slope -= x;
        }
        const int pair = lane_index() % 4;
        const uint32_t two = pair == 0   ? pack<__nv_bfloat16>(part[0], part[1])
                             : pair == 1 ? pack<__nv_bfloat16>(part[2], 0.0f)
                                         : 0;
        return A{{{{two, two, 0, 0}}}};
    }
};

// Starts C = A B + A' B' as a group of its own, where A' is in registers. None may be touched before it is waited for.
template <class T, int k, int cols, class A, class B, class MoreB>
__device__ inline void start_products(Accumulator<16, cols> &c, const A &a, const B &b, const HeldA<16, 16> &more_a,
                                      const MoreB &more_b) {
    stay_here(c);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < k / 16; ++step)
        Wgmma<T, cols>::template of_shared<A::by_columns, B::by_columns>(c.block[0], a.at(step), b.at(step), step > 0);
    Wgmma<T, cols>::template of_registers<MoreB::by_columns>(c.block[0], more_a.block[0][0], more_b.at(0), true);
    wgmma_commit();
}

// Scores as Softcap has them, and the slope of a head. Without ALiBi it is no more than that.
template <bool softcap, bool alibi, bool polynomial_tanh = false,
          class Capped = std::conditional_t<polynomial_tanh, NearSoftcap, Softcap<softcap>>>
struct SlopingScores : Capped {
    float slope;  // in log2
    int shift;    // from a row to its own key

    template <class Params>
    __device__ explicit SlopingScores(const Params &params) : Capped(params) {}

    // The softcap of S, in place. A mask may hide some of S, or none.
    template <bool may_hide, int cols>
    __device__ void cap(Accumulator<16, cols> &s) const {
        if constexpr (polynomial_tanh)
            this->template apply<may_hide>(s);
        else
            this->apply(s);
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
    __device__ float unscaled() const { return slope / this->scale; }

    // To S, in place: of the rows from `first_row` on and the keys from `first_key` on.
    template <int cols>
    __device__ void add_slope(Accumulator<16, cols> &s, int first_row, int first_key) const {
        if constexpr (alibi) {
            const float unscaled = this->unscaled(), before = -first_of_lane(first_row, first_key);
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
    template <bool in_line, bool by_product = false>
    __device__ auto line(int first_row, int first_key) const {
        if constexpr (alibi && in_line)
            return Line<by_product>{slope, first_of_lane(first_row, first_key) - by_product * accumulator_col()};
        else
            return NoLine();
    }

  private:
    __device__ float first_of_lane(int first_row, int first_key) const {
        return first_key + accumulator_col() - first_row - accumulator_row() - shift;
    }
};
