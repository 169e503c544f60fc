// A softmax that begins the next tile while O of the last one is yet to come.
#pragma once
#include "softmax/optimistic.cuh"

// m and l are the next tile's when O has come. So 1 / l alone says what is to become of O: it is 0 for a row that saw no key.
struct AcrossTilesSoftmax : OptimisticSoftmax {
    // A tile's first block, which forgets the tile before.
    template <int cols>
    __device__ void start(Accumulator<16, cols> &s) {
        looks_for_maxima = false;
        OptimisticSoftmax::start(s);
    }

    __device__ void finalize() {
        OptimisticSoftmax::finalize();
        each_row([&](int h) {
            if (l[h] == 0.0f) reciprocal[h] = 0.0f;
        });
    }

    // Always true, as is_summed: no sum has these bits, which are a NaN's that no instruction gives. That l is not below 0
    // the compiler would see here, as it was added up from 0.
    __device__ bool has_begun() const { return __float_as_uint(l[0] + l[1]) != 0xffffffff; }

    // As OptimisticSoftmax does, but l is not O's any more.
    template <int head_dim>
    __device__ void normalize(Accumulator<16, head_dim> &o) {
        if (sees_none)
            each_row([&](int h) {
                if (reciprocal[h] != 0.0f) return;
                reciprocal[h] = 0.0f;
                each_element(o, h, [&](float &x) { x = 0.0f; });
            });
        each_row([&](int h) { scale_row(o, h, reciprocal[h]); });
    }
};
