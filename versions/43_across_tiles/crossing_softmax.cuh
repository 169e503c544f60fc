// A softmax that begins the next tile while O of the last one is yet to come.
#pragma once
#include "39_shorter_turn/ending_softmax.cuh"

// m and l are the next tile's when O has come. So 1 / l alone says what is to become of O: it is 0 for a row that saw no key.
template <int rows, class Base = DeferredSoftmax<rows>>
struct CrossingSoftmax : EndingSoftmax<rows, Base> {
    // A tile's first block, which forgets the tile before.
    template <int cols>
    __device__ void start(Accumulator<rows, cols> &s) {
        this->looks = false;
        EndingSoftmax<rows, Base>::start(s);
    }

    __device__ void sum_up() {
        EndingSoftmax<rows, Base>::sum_up();
        this->each_row([&](int b, int h) {
            if (this->l[b][h] == 0.0f) this->reciprocal[b][h] = 0.0f;
        });
    }

    // Always true, as is_summed: no sum has these bits, which are a NaN's that no instruction gives. That l is not below 0
    // the compiler would see here, as it was added up from 0.
    __device__ bool has_begun() const { return __float_as_uint(this->l[0][0] + this->l[0][1]) != 0xffffffff; }

    // As EndingSoftmax does, but l is not O's any more.
    template <int head_dim>
    __device__ void divide(Accumulator<rows, head_dim> &o) {
        this->divide_unless(o, [&](int b, int h) { return this->reciprocal[b][h] == 0.0f; });
    }
};
