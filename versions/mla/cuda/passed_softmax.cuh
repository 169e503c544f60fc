// Online softmax of rows whose blocks of keys two groups take in turn: who has a block passes its maxima, and P, to the
// other. Warp w of a group passes to warp w of the other one: both have the same 16 rows.
#pragma once
#include "shared_softmax.cuh"

template <int rows>
struct PassedSoftmax : SharedSoftmax<2, rows> {
    using Base = SharedSoftmax<2, rows>;
    using Base::each_row, Base::m, Base::row;
    struct Shared : Base::Shared {
        float m[rows];  // of the latest block
    };
    float (&passed)[rows];

    __device__ PassedSoftmax(Shared &shared, int party, int first, float unit)
        : Base(shared, party, first, unit), passed(shared.m) {}

    // Raises m to the highest score of this group's block, and turns S into P. Returns by what O is yet to be multiplied.
    template <int keys>
    __device__ float2 take(Accumulator<16, keys> &s) {
        float factor[2];
        each_row([&](int h) {
            factor[h] = this->raise(fmaxf(m[0][h], quad_max(this->lane_max(s, 0, h)) * this->unit), 0, h);
            if (lane_index() % 4 == 0) passed[row(h)] = m[0][h];
        });
        this->exponentiate(s, this->l);
        return {factor[0], factor[1]};
    }

    // The same for the other group's block, which it has passed.
    __device__ float2 follow() {
        float factor[2];
        each_row([&](int h) { factor[h] = this->raise(passed[row(h)], 0, h); });
        return {factor[0], factor[1]};
    }

    template <int cols>
    __device__ static void scale(Accumulator<16, cols> &o, float2 factor) {
        Base::scale_row(o, 0, 0, factor.x);
        Base::scale_row(o, 0, 1, factor.y);
    }
};
