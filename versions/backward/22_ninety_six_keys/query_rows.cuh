// S and dP of a warp with rows of Q as their rows and keys as their columns, and from there to P and dS. A lane has numbers of two
// rows: row h is row 8 * h + accumulator_row() of the warp's.
#pragma once
#include "any_attention.cuh"
#include "dq.cuh"

// An operand in shared memory of which a loop keeps 32 bits: the others of its descriptor are the same for all, and what leads to
// its parts never carries into them. The compiler makes descriptors anew, and does not hold those of all steps.
template <class Operand>
struct Near {
    static constexpr bool by_columns = Operand::by_columns;
    static constexpr uint32_t high = 1 << 30 | 1024 >> 4;  // 128-byte swizzle, and what leads from 8 rows to the next 8
    uint32_t low;

    __device__ explicit Near(uint32_t low_) : low(low_) {}
    template <class Tile>
    __device__ explicit Near(const Tile *tile, int row = 0, int col = 0) {
        Operand operand;
        operand.start(tile);
        low = static_cast<uint32_t>(operand.below(row).right(col).first);
    }
    __device__ uint64_t at(int step) const {
        return static_cast<uint64_t>(high) << 32 | (low + static_cast<uint32_t>(Operand{0}.at(step)));
    }
    __device__ Near after(int tiles) const { return Near{low + static_cast<uint32_t>(Operand{0}.after(tiles).first)}; }
    __device__ Near right(int cols) const { return Near{low + static_cast<uint32_t>(Operand{0}.right(cols).first)}; }
    // The same, of which the compiler does not know what it is.
    __device__ Near made_anew() const {
        Near same = *this;
        stay_here(same.low);
        return same;
    }
};

// The numbers of the lane's rows, of those of the warp's.
struct LaneNumbers {
    float of[2];

    __device__ explicit LaneNumbers(const float *numbers) : of{numbers[accumulator_row()], numbers[8 + accumulator_row()]} {}
};

// Visits the elements of a warp's 16 rows: visit(x, n, h, i), where x is of row h and of the lane's key 8 * n + i.
template <int keys, class Visit>
__device__ inline void each_key(Accumulator<16, keys> &s, Visit visit) {
#pragma unroll
    for (int n = 0; n < keys / 8; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int i = 0; i < 2; ++i) visit(s.block[0][n][2 * h + i], n, h, i);
}

// Sets to minus infinity the scores of keys that a row does not see.
template <int keys>
__device__ inline void hide_keys(const Mask &mask, Accumulator<16, keys> &s, int first_row, int first_key) {
    if (first_key + keys <= mask.end_key(first_row) && first_key >= mask.first_key(first_row + 15)) return;
    int first[2], end[2];  // counted from the lane's first key
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = first_row + h * 8 + accumulator_row(), key = first_key + accumulator_col();
        first[h] = mask.first_key(row) - key;
        end[h] = mask.end_key(row) - key;
    }
    each_key(s, [&](float &x, int n, int h, int i) {
        if (n * 8 + i >= end[h] || (config::window && n * 8 + i < first[h])) x = -INFINITY;
    });
}

// As `weights` of weights.cuh does it: S becomes what dP - delta is multiplied by, and with a softcap, `p` becomes P. `ahead` keys
// are between the first key and the first row's own.
template <class T, int keys>
__device__ inline void weigh_keys(Accumulator<16, keys> &s, HeldA<16, keys> &p, const LaneNumbers &lse, float unit, float slope,
                                  int ahead) {
    const float lane_ahead = ahead + accumulator_row() - accumulator_col();
    each_key(s, [&](float &x, int n, int h, int i) {
        const float tanh = x;
        float lost = lse.of[h];
        if (config::alibi) lost += slope * fabsf(lane_ahead + (h * 8 - n * 8 - i));
        x = exp2_approx(unit * x - lost);
        if (!config::softcap) return;
        const float derivative = __saturatef(fmaf(-tanh, tanh, 1.0f));  // 0, not -inf, of a hidden key
        uint32_t &pair = p.block[n / 2][0][n % 2 * 2 + h];
        pair = i == 0 ? __float_as_uint(x) : pack<T>(__uint_as_float(pair), x);
        x *= derivative;
    });
}

// dS = W * (rescale * dP - delta), in the place of dP.
template <int keys>
__device__ inline void weigh_key_gradients(Accumulator<16, keys> &dp, const Accumulator<16, keys> &w, const LaneNumbers &delta,
                                           float rescale) {
    each_key(dp, [&](float &x, int n, int h, int i) { x = w.block[0][n][2 * h + i] * (rescale * x - delta.of[h]); });
}

// Writes an operand to the columns of a tile in shared memory that has its transpose, 16 x 16 at a time. `place` has the lane's
// address, `first_col` is a multiple of 64.
template <class Tile, class T, int keys>
__device__ inline void store_transposed(const HoistedColumns<Tile, T, ByRow> &place, int tile, int first_col,
                                        const HeldA<16, keys> &operand) {
#pragma unroll
    for (int step = 0; step < keys / 16; ++step)
        stmatrix_x4_trans(place.address(step * 16, first_col) + tile * Tile::size * sizeof(T), operand.block[step][0]);
}

// Which weights of a warp are kept, a bit for each of a lane's scores.
template <int keys>
struct KeptKeys {
    uint32_t bits;  // bit 8 * byte_of(i) + 2 * step + n is of score n of block[step][0][i] of an operand

    __device__ static constexpr int byte_of(int i) { return i % 2 * 2 + i / 2; }

    __device__ void draw(const Dropout<true> &dropping, int first_row, int first_key) {
        constexpr uint32_t top = 0x80808080;
        const int swapped = first_row / 16 % 2;  // the words of a pair
        bits = 0;
#pragma unroll
        for (int step = 0; step < keys / 16; ++step) {
            const auto pairs = dropping.draw_one<false, 16>(first_row, 0, first_key + step * 16);
            const uint32_t first = (pairs.words[0][0] & top) >> (1 - swapped);
            const uint32_t second = (pairs.words[0][1] & top) >> swapped;
            bits |= (first | second) >> (6 - 2 * step);
        }
    }
    // Of P, those that are dropped become zero.
    __device__ void drop(HeldA<16, keys> &p) const {
#pragma unroll
        for (int step = 0; step < keys / 16; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                p.block[step][0][i] &= spread_signs(bits << (7 - 2 * step), bits << (6 - 2 * step), 0xcc88 + 0x1111 * byte_of(i));
    }
    // The same of dP.
    __device__ void drop(Accumulator<16, keys> &dp) const {
        each_key(dp, [&](float &x, int n, int h, int i) {
            if (!(bits >> (8 * byte_of(n % 2 * 2 + h) + n / 2 * 2 + i) & 1)) x = 0.0f;
        });
    }
};
