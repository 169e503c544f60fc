// Columns of K and V that a warp holds for its 16 keys: as operands in registers they need not be read from shared memory for each
// step of rows.
#pragma once
#include "warpgroup_tiles.cuh"

// An operand of S^T or dP^T whose first columns are held.
template <int held>
struct HeldColumns {
    HeldA<16, (held > 0 ? held : 16)> first;
    ByRows<KTile> others;

    template <class T>
    __device__ void start(const T *tile, int warp_key) {
        others.start(tile, warp_key);
        HoistedReader<KTile, T> reader;
        reader.start(tile, warp_key);
#pragma unroll
        for (int step = 0; step < held / 16; ++step) ldmatrix_x4(first.block[step][0], reader.address(0, step * 16));
    }
};

template <class T, int k, int held, int cols, class B>
__device__ inline void start_product(Accumulator<16, cols> &c, const HeldColumns<held> &a, const B &b) {
    stay_here(c);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < k / 16; ++step)
        if (step < held / 16)
            Wgmma<T, cols>::template of_registers<B::by_columns>(c.block[0], a.first.block[step][0], b.at(step), step > 0);
        else
            Wgmma<T, cols>::template of_shared<false, B::by_columns>(c.block[0], a.others.at(step), b.at(step), step > 0);
    wgmma_commit();
}
