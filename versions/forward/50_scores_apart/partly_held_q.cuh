// Q of a warpgroup that has not enough registers for all its columns: the last ones stay in shared memory.
#pragma once
#include "tile/warpgroup_gemm.cuh"

// An operand of Q K^T, for a warpgroup's products and for those of a warp alone (`fetch` and `at`).
template <class Tile, class T, int held_cols>
struct PartlyHeldQ {
    static constexpr int steps = held_cols / 16;
    using Rest = SwizzledPanels<Tile::rows, Tile::cols - held_cols>;
    HeldA<16, held_cols> held;
    QOperand<16, Rest::cols, 2, HoistedReader<Rest, T>> streamed;
    ByRows<Rest> rest;

    // Takes a tile that may be overwritten afterwards. Its last columns go to `to`, by all warps of the group.
    __device__ void start(const T *tile, T *to, int warp_row) {
        HoistedReader<Tile, T> from;
        HoistedReader<Rest, T> place;
        from.start(tile, warp_row), place.start(to, warp_row);
        named_barrier_sync(1, warpgroup_threads);  // no product of the tile before reads `to`
#pragma unroll
        for (int step = 0; step < Rest::cols / 16; ++step) {
            uint32_t block[4];
            ldmatrix_x4(block, from.address(0, held_cols + step * 16));
            stmatrix_x4(place.address(0, step * 16), block);
        }
#pragma unroll
        for (int step = 0; step < steps; ++step) ldmatrix_x4(held.block[step][0], from.address(0, step * 16));
        fence_proxy_async();  // products see what this thread wrote, and it has read before TMA writes again
        named_barrier_sync(1, warpgroup_threads);
        rest.start(to);
        streamed.start(to, warp_row);
    }
    // S = Q K^T
    template <int cols, class K>
    __device__ void start_product(Accumulator<16, cols> &s, const K &k) const {
        ::start_product<T>(s, held, k);
        ::start_product<T, Rest::cols>(s, rest, k.right(held_cols), true);
    }
    __device__ void fetch(int step) {
        if (step >= steps) streamed.fetch(step - steps);
    }
    __device__ const uint32_t (&at(int step, int m) const)[4] {
        return step < steps ? held.at(step, m) : streamed.at(step - steps, m);
    }
};
