// Online softmax of rows whose keys several parties of a CTA share out, warps or warpgroups: all have the same maximum.
#pragma once
#include "decode/cuda/decode_softmax.cuh"

// Of 16 rows, the warp's own: row `first` of `rows`, and the next.
template <int parties, int rows>
struct SharedSoftmax : DecodeSoftmax {
    struct Shared {
        float of_party[parties][rows];  // maxima in the loop, sums behind it
    };
    Shared &shared;
    int party, first;

    __device__ SharedSoftmax(Shared &shared_, int party_, int first_, float unit)
        : DecodeSoftmax{unit}, shared(shared_), party(party_), first(first_) {}

    // One of the lane's two rows.
    __device__ int row(int h) const { return first + h * 8 + accumulator_row(); }

    // Tells the other parties the highest scores of this one's keys. A barrier has to follow.
    template <int keys>
    __device__ void offer_maximum(const Accumulator<16, keys> &s) {
        each_row([&](int h) { offer(h, quad_max(lane_max(s, 0, h)) * unit); });
    }

    // Raises m to the highest score of all parties, brings l and O down to it, and turns S into P.
    template <int keys, int cols>
    __device__ void update(Accumulator<16, keys> &s, Accumulator<16, cols> &o) {
        each_row([&](int h) { raise(fmaxf(m[0][h], of_all(h, fmaxf)), o, 0, h); });
        exponentiate(s, l);
    }

    // Writes P, from column `first_col` on, where every party reads it.
    template <class Tile, class T, int keys>
    __device__ void store_p(T *shared_p, int first_col, const Accumulator<16, keys> &p) const {
        each_row([&](int h) {
#pragma unroll
            for (int n = 0; n < keys / 8; ++n)
                *reinterpret_cast<uint32_t *>(shared_p + Tile::offset(row(h), first_col + n * 8 + accumulator_col())) =
                    pack<T>(p.block[0][n][2 * h], p.block[0][n][2 * h + 1]);
        });
    }

    // Tells the other parties the sums of this one's keys. A barrier has to follow.
    __device__ void offer_sum() {
        each_row([&](int h) { offer(h, quad_sum(l[0][h])); });
    }

    // l of all keys.
    __device__ void sum_up() {
        each_row([&](int h) { l[0][h] = of_all(h, [](float x, float y) { return x + y; }); });
    }

    // The log-sum-exp of one of the lane's rows, in natural logarithms: -inf of a row that sees no key.
    __device__ float lse(int h) const { return (m[0][h] + __log2f(l[0][h])) * ln_2; }

    template <class Row>
    __device__ static void each_row(Row row) {
#pragma unroll
        for (int h = 0; h < 2; ++h) row(h);
    }

  protected:
    __device__ void offer(int h, float x) {
        if (lane_index() % 4 == 0) shared.of_party[party][row(h)] = x;
    }
    template <class Join>
    __device__ float of_all(int h, Join join) const {
        float joined = shared.of_party[0][row(h)];
#pragma unroll
        for (int p = 1; p < parties; ++p) joined = join(joined, shared.of_party[p][row(h)]);
        return joined;
    }
};
