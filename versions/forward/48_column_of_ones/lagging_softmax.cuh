// An online softmax without maxima and without sums. P is 2^(scale * S - m) with an m that may lag far behind the scores, and
// the sum of P is a column of O. With dropout O has not all of P; then `weigh` sums P.
#pragma once
#include <float.h>

#include <type_traits>

#include "ptx/sm90.cuh"
#include "softmax/sinks.cuh"
#include "softmax/softcap.cuh"
#include "tile/rows.cuh"

// What is added to the lane's scores of row h, in log2, column by column: nothing.
struct NoLine {
    __device__ float begin(int, float minus_m) const { return minus_m; }
    __device__ float at(float begun, int) const { return begun; }
};

// What becomes of the scores of row h before they are scaled: nothing. visit(of_score) goes through them.
struct NoCap {
    template <int cols, class Visit>
    __device__ void of_row(Accumulator<16, cols> &, int, Visit visit) const {
        visit([](float x) { return x; });
    }
};

// m is a whole number and moves by whole numbers, so what follows it is exact. A row's m depends on its own scores alone.
//
// bf16 reaches as far as fp32. So m begins `headroom` above the first maximum, and P may grow by as much. The price: of V
// below 2^-64 bits are lost. fp16 ends at 2^-24. So m begins at the first maximum there, and P may grow until it would be
// rounded to infinity.
//
// Hidden scores, -inf, weigh 0: until a row has been shown another one, its m is the lowest finite number.
//
// 2^(scale * S - m) by one fused multiply-add is as wrong as m is rounded, which beyond 2^24 is a unit and more. So a row whose
// maximum is so far from 0 has `far` in the place of m: each P is infinite, and the rare path counts S from the row's
// maximum, to which the difference is exact near it. That lies in local memory, so other rows pay nothing.
//
// That no P has passed the limit is seen of the lane's sums, where they are wanted anyway: no P is above its sum. Else it is
// seen of each P.
template <class T, bool with_lse>
struct LaggingSoftmax {
    static constexpr bool is_half = std::is_same_v<T, __half>;
    static constexpr float headroom = is_half ? 0.0f : 62.0f;  // in log2
    static constexpr float limit = is_half ? 65520.0f : 2.0f;  // of P
    static constexpr float lost = 0x1p60f;  // from here on P has lost its scores: what scales it down is at least 2^-126
    static constexpr float far = -0x1.fffffcp127f;  // in the place of m
    float scale;                                    // of scores, in log2
    float m[2];
    float origin[2];       // of far rows, unscaled: their m is `headroom`, counted from there
    Accumulator<16, 8> w;  // the sum of P as it is rounded, in all columns
    float l[2];            // the lane's share of the sum of P before it is rounded, which the log-sum-exp needs
    float rounding[2];     // what rounding has added to l too much
    uint32_t seen;         // of the last block, see `look`
    float factor[2];       // by which O is yet to be scaled
    bool raised;           // m, with the last block of scores

    // Before a tile of which no row may see a key.
    __device__ void reset() {
        each_row([&](int h) {
            m[h] = -FLT_MAX;
            l[h] = rounding[h] = 0.0f;
        });
        w.clear();
    }

    // The first block of scores: S becomes P.
    template <int cols>
    __device__ void start(Accumulator<16, cols> &s) {
        each_row([&](int h) {
            begin(h, row_max(s, h));
            l[h] = rounding[h] = 0.0f;
        });
        w.clear();
        const bool is_far[2] = {m[0] == far, m[1] == far};
        if (any(is_far[0] || is_far[1]))
            each_row([&](int h) {
                const Base base = base_of(h);
                m[h] = base.m;
                each_element(s, h, [&](float &x) { x -= base.origin; });
            });
        float sum[2];
        exponentiate(s, sum);
        each_row([&](int h) { m[h] = is_far[h] ? far : m[h]; });
        add(sum);
    }

    // Whether some row of the warp has not been shown a score that it sees, so that it has no m yet.
    __device__ bool has_new_rows() const {
        bool is_new = false;
        each_row([&](int h) { is_new |= m[h] == -FLT_MAX; });
        return __any_sync(0xffffffff, is_new);
    }

    // Gives such rows an m.
    template <int cols>
    __device__ void begin_new_rows(Accumulator<16, cols> &s) {
        each_row([&](int h) {
            const float highest = row_max(s, h);
            if (m[h] == -FLT_MAX) begin(h, highest);
        });
    }

    // A further block: S becomes P, after `cap` and with `line`. `recompute(rows)` brings back S, with both of them, of rows
    // whose P has lost it.
    template <int cols, class Recompute, class Line = NoLine, class Cap = NoCap>
    __device__ void update(Accumulator<16, cols> &s, Recompute recompute, Line line = {}, Cap cap = {}) {
        float sum[2];
        raised = false;
        exponentiate(s, sum, line, cap);
        if (any(seen >= __float_as_uint(limit))) raise(s, sum, recompute);
        add(sum);
    }

    // O and its sums follow m.
    template <int columns>
    __device__ void rescale(Accumulator<16, columns> &o) const {
        if (raised)
            each_row([&](int h) {
                if (any(factor[h] != 1.0f)) scale_row(o, h, factor[h]);
            });
    }

    // Adds a block of P to w.
    template <int cols>
    __device__ void weigh(const HeldA<16, cols> &p) {
        const uint32_t ones = pack<T>(1.0f, 1.0f);
#pragma unroll
        for (int step = 0; step < cols / 16; ++step) mma_m16n8k16<T>(w.block[0][0], p.at(step, 0), ones, ones);
    }
    __device__ float row_w(int h) const { return w.block[0][0][2 * h]; }

    // The same of what is yet to be rounded, without the tensor cores: w is the lane's share.
    template <int cols>
    __device__ void sum_rounded(const Accumulator<16, cols> &s) {
#pragma unroll
        for (const auto &block : s.block[0])
            each_row([&](int h) { w.block[0][0][2 * h] += sum_of_rounded(block[2 * h], block[2 * h + 1]); });
    }

    // A row's m, as it counts from 0.
    __device__ float m_from_zero(int h) const { return base_of(h).from_zero(scale); }

    // The log-sum-exp of the warp's rows before row `end`, in natural logarithms. No branch.
    template <bool sinks>
    __device__ void store_lse_if(bool wanted, float *lse, int end, const Sink<sinks> &sink) const {
        each_row([&](int h) {
            const int row = h * 8 + accumulator_row();
            const float value = sink.in_log(m_from_zero(h) + __log2f(quad_sum(l[h]))) * ln_2;
            store_global_4_if(wanted && lane_index() % 4 == 0 && row < end, lse + row, value);
        });
    }

    // Always true, which the compiler cannot know: what is told from it comes behind all of P.
    __device__ bool is_computed() const { return seen != 0xffffffff; }

  private:
    // What a row's P is counted from: 2^(scale * (S - origin) - m).
    struct Base {
        float origin, m;
        __device__ float from_zero(float scale) const { return fmaf(origin, scale, m); }
    };
    __device__ Base base_of(int h) const { return m[h] == far ? Base{origin[h], headroom} : Base{0.0f, m[h]}; }

    static __device__ float sum_of_rounded(float low, float high) {
        const uint32_t two = pack<T>(low, high);
        if constexpr (is_half) {
            const float2 values = __half22float2(reinterpret_cast<const __half2 &>(two));
            return values.x + values.y;
        } else {
            return __uint_as_float(two << 16) + __uint_as_float(two & 0xffff0000);
        }
    }

    // Sets m of a row with this maximum.
    __device__ void begin(int h, float highest) {
        const float in_log = highest * scale;
        m[h] = fmaxf(ceilf(in_log) + headroom, -FLT_MAX);
        if (fabsf(in_log) >= 0x1p23f && fabsf(highest) < INFINITY) {
            m[h] = far;
            static_cast<volatile float &>(origin[h]) = highest;  // so it stays out of registers
        }
    }

    // Turns S into P. P has three operands, and the operand cache keeps the last one of each kind and bank: if one row's
    // elements follow each other, m stays there, wherever ptxas has put it.
    template <int cols, class Line = NoLine, class Cap = NoCap>
    __device__ void exponentiate(Accumulator<16, cols> &s, float (&sum)[2], Line line = {}, Cap cap = {}) {
        uint32_t before = 0;
        seen = 0;
        each_row([&](int h) {
            // m stays what it is, as no P is negative. The compiler cannot know that, so it waits for most of the row
            // before: not for all of it, or the exponentials would pause.
            if (h > 0) m[h] = fmaxf(m[h], fminf(__uint_as_float(before), -FLT_MAX));
            sum[h] = 0.0f;
            const float begun = line.begin(h, -m[h]);
            cap.of_row(s, h, [&](auto of_score) {
                int done = 0;
                each_element(s, h, [&](float &x) {
                    x = exp2_approx(fmaf(of_score(x), scale, line.at(begun, done / 2 * 8 + done % 2)));
                    sum[h] += x;  // no code unless it is used
                    if constexpr (!with_lse) look(x);
                    if (++done == cols / 4 * 3 / 4) before = with_lse ? __float_as_uint(sum[h]) : seen;
                });
            });
        });
        if constexpr (with_lse) each_row([&](int h) { look(sum[h]); });
    }

    // Adds a block's sums to l, and keeps what rounding loses (Kahan, 1965).
    __device__ void add(const float (&sum)[2]) {
        if constexpr (with_lse)
            each_row([&](int h) {
                const float added = sum[h] - rounding[h], total = l[h] + added;
                rounding[h] = total - l[h] - added;
                l[h] = total;
            });
    }

    // Floats that are not negative are in order as integers too, NaN above all. The top bit of an exponent is set from 2 on,
    // which all together tell; of fp16 the largest is kept.
    __device__ void look(float p) {
        const uint32_t x = __float_as_uint(p);
        seen = is_half ? max(seen, x) : seen | x;
    }

    static __device__ bool any(bool of_lane) { return __any_sync(0xffffffff, of_lane); }

    // The rare path: P of some row has passed the limit, or its sum has. If P has, m goes up, and P comes down to where a first
    // block's is; else all stays what it is.
    template <int cols, class Recompute>
    __device__ void raise(Accumulator<16, cols> &s, float (&sum)[2], Recompute recompute) {
        raised = true;
        float highest[2];
        bool is_lost[2];
        each_row([&](int h) {
            highest[h] = row_max(s, h);
            is_lost[h] = highest[h] >= lost;
            factor[h] = 1.0f;
        });
        seen = 0;  // no register for it meanwhile
        if (any(is_lost[0] || is_lost[1])) recompute(is_lost);
        each_row([&](int h) {
            if (!any(highest[h] >= limit)) return;  // no row of this half moves
            const Base before = base_of(h);
            const float scores = any(is_lost[h]) ? row_max(s, h) : 0.0f;  // of a lost row
            if (is_lost[h])
                begin(h, m[h] == far ? fmaxf(scores, before.origin) : scores);
            else if (highest[h] >= limit)
                m[h] += ceilf(__log2f(highest[h])) + headroom;
            const Base base = base_of(h);
            factor[h] = exp2_approx(fmaf(before.origin - base.origin, scale, before.m - base.m));
            l[h] *= factor[h];
            rounding[h] *= factor[h];
            scale_row(w, h, factor[h]);
            if (is_lost[h])
                each_element(s, h, [&](float &x) { x = exp2_approx(fmaf(x - base.origin, scale, -base.m)); });
            else
                scale_row(s, h, factor[h]);
            sum[h] = 0.0f;
            each_element(s, h, [&](float &x) { sum[h] += x; });
        });
    }
};
