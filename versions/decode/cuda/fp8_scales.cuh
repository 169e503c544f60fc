// What becomes of numbers in caches of 8-bit floats, whose scales are of heads, of the cache or of pages.
#pragma once
#include "fp8_operands.cuh"
#include "scaled_cache.cuh"

// What a cache has of a number: the nearest one, in units of the scale.
template <class T>
struct Quantised {
    using Element = uint8_t;
    float k_scale, v_scale;

    template <class Params>
    __device__ Quantised(const Params &params, int sequence, int page, int head_k) {
        const int at = params.scale_at(sequence, page, head_k);
        k_scale = params.k_descale[at], v_scale = params.v_descale[at];
    }
    __device__ uint8_t k(float x) const { return f32_to_e4m3(__fdiv_rn(x, k_scale)); }
    __device__ uint8_t v(float x) const { return f32_to_e4m3(__fdiv_rn(x, v_scale)); }
};

// The scales that a warp needs, with `keys` keys in a step, of which it copies a part. Scores are multiplied by k_unit, and
// in the end O by what V is in units of.
template <int keys, bool by_page = config::page_scales, int copied = keys>
struct WarpScales {
    static constexpr int stage_size = 0;  // floats of shared memory for the keys of a step
    float k_unit, v_unit;

    template <class Params>
    __device__ WarpScales(const Params &params, int sequence, int head_k, float *) {
        const int at = params.scale_at(sequence, 0, head_k);
        k_unit = params.k_descale[at], v_unit = params.v_descale[at];
    }
    __device__ void copy(int, int, bool, int = 0) const {}
    __device__ void scale_scores(int, Accumulator<16, keys> &) const {}
    template <int cols>
    __device__ void scale_weights(int, Accumulator<16, keys> &, Accumulator<16, cols> &) {}
    template <int cols>
    __device__ void scale_sum(Accumulator<16, cols> &o) const {
        scale(o, v_unit);
    }
};

// Those of pages are copied beside the keys. P is multiplied by the scales of V, in units that keep what a row has so far in
// the range of f16. They are each row's own: they depend on no key that it does not see.
template <int keys, int copied>
struct WarpScales<keys, true, copied> {
    static constexpr int stage_size = 2 * keys;
    float k_unit = 1.0f, v_unit[2] = {};
    const float *k_descale, *v_descale;  // of the head in page 0
    int apart;
    float *ring;

    template <class Params>
    __device__ WarpScales(const Params &params, int, int head_k, float *ring_)
        : k_descale(params.k_descale + head_k), v_descale(params.v_descale + head_k), apart(params.num_heads_k),
          ring(ring_) {}

    // Starts copying the scales of the lane's key, which is in `page`, or not there. The lanes' keys begin with `first`.
    __device__ void copy(int stage, int page, bool is_there, int first = 0) const {
        if (lane_index() >= copied) return;
        float *to = ring + stage * stage_size + first + lane_index();
        const long long from = static_cast<long long>(page) * apart;
        cp_async_4_or_zeros(shared_address(to), k_descale + from, is_there);
        cp_async_4_or_zeros(shared_address(to + keys), v_descale + from, is_there);
    }
    __device__ void scale_scores(int stage, Accumulator<16, keys> &s) const { multiply(s, ring + stage * stage_size); }
    template <int cols>
    __device__ void scale_weights(int stage, Accumulator<16, keys> &p, Accumulator<16, cols> &o) {
        multiply(p, ring + stage * stage_size + keys);
        each_row([&](int h) {
            const float unit = fmaxf(v_unit[h], row_max(p, h) / Fp8Softmax::highest);
            const float inverse = unit > 0.0f ? 1.0f / unit : 0.0f;
            scale_row(o, h, v_unit[h] * inverse);
            scale_row(p, h, inverse);
            v_unit[h] = unit;
        });
    }
    template <int cols>
    __device__ void scale_sum(Accumulator<16, cols> &o) const {
        each_row([&](int h) { scale_row(o, h, v_unit[h]); });
    }

  private:
    __device__ static void multiply(Accumulator<16, keys> &s, const float *of_keys) {
#pragma unroll
        for (int n = 0; n < keys / 8; ++n) {
            const float2 two = *reinterpret_cast<const float2 *>(of_keys + n * 8 + accumulator_col());
#pragma unroll
            for (int i = 0; i < 4; ++i) s.block[0][n][i] *= i % 2 ? two.y : two.x;
        }
    }
};
