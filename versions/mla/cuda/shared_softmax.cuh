// Online softmax of 16 rows whose keys the warps of a CTA share out: all warps have the same maximum.
#pragma once
#include "decode/cuda/decode_softmax.cuh"

template <int warps, int rows>
struct SharedSoftmax : DecodeSoftmax {
    struct Shared {
        float of_warp[warps][rows];  // maxima in the loop, sums behind it
    };
    Shared &shared;

    __device__ SharedSoftmax(Shared &shared_, float unit) : DecodeSoftmax{unit}, shared(shared_) {}

    // Tells the other warps the highest scores of this one's keys. A barrier has to follow.
    template <int cols>
    __device__ void offer_maximum(const Accumulator<rows, cols> &s) {
        each_row([&](int h) {
            const float highest = quad_max(lane_max(s, 0, h)) * unit;
            if (lane_index() % 4 == 0) shared.of_warp[warp_index()][h * 8 + accumulator_row()] = highest;
        });
    }

    // Raises m to the highest score of all warps, brings l and O down to it, and turns S into P.
    template <int keys, int cols>
    __device__ void update(Accumulator<rows, keys> &s, Accumulator<rows, cols> &o) {
        each_row([&](int h) { raise(fmaxf(m[0][h], over_warps(h, fmaxf)), o, 0, h); });
        exponentiate(s, l);
    }

    // Writes P, from column `first` on, where every warp reads it.
    template <class Tile, class T, int cols>
    __device__ static void store_p(T *shared_p, int first, const Accumulator<rows, cols> &p) {
        each_row([&](int h) {
#pragma unroll
            for (int n = 0; n < cols / 8; ++n)
                *reinterpret_cast<uint32_t *>(
                    shared_p + Tile::offset(h * 8 + accumulator_row(), first + n * 8 + accumulator_col())) =
                    pack<T>(p.block[0][n][2 * h], p.block[0][n][2 * h + 1]);
        });
    }

    // Sums l over the lanes and warps of each row.
    __device__ void sum_up() {
        each_row([&](int h) {
            const float whole = quad_sum(l[0][h]);
            if (lane_index() % 4 == 0) shared.of_warp[warp_index()][h * 8 + accumulator_row()] = whole;
        });
        __syncthreads();  // the sums of all warps are there
        each_row([&](int h) { l[0][h] = over_warps(h, [](float x, float y) { return x + y; }); });
    }

    // row(h, its sum, its log-sum-exp in natural logarithms), of the lane's two rows. -inf of a row that sees no key.
    template <class Row>
    __device__ void finish(Row row) const {
        each_row([&](int h) { row(h, l[0][h], (m[0][h] + __log2f(l[0][h])) * ln_2); });
    }

  private:
    template <class Row>
    __device__ static void each_row(Row row) {
#pragma unroll
        for (int h = 0; h < 2; ++h) row(h);
    }
    template <class Join>
    __device__ float over_warps(int h, Join join) const {
        const int row = h * 8 + accumulator_row();
        float joined = shared.of_warp[0][row];
#pragma unroll
        for (int w = 1; w < warps; ++w) joined = join(joined, shared.of_warp[w][row]);
        return joined;
    }
};
