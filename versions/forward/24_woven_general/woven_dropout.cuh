// The mask of a block of P, two chunks of 16 keys at a time: drawn while the two chunks before enter O += P V.
#pragma once
#include "softmax/dropout.cuh"

template <bool dropout, int rows, int cols>
struct WovenDropout {
    using Draw = typename Dropout<dropout>::template Draw<false, rows>;
    static constexpr int blocks = rows / 16, chunks = cols / 16;
    const Dropout<dropout> &of;
    int first_row, first_key;  // of the block
    Draw draws[blocks];

    // Draws for the first chunks. Unless there is dropout, it does nothing.
    __device__ WovenDropout(const Dropout<dropout> &of_, int first_row_, int first_key_)
        : of(of_), first_row(first_row_), first_key(first_key_) {
        if constexpr (dropout) {
#pragma unroll
            for (int m = 0; m < blocks; ++m)
                draws[m].pairs = chunks == 1 ? of.template draw_one<false, rows>(first_row, m, first_key)
                                             : of.template draw<false, rows>(first_row, m, first_key);
        }
    }

    // Part `part` of `parts` beside a chunk, of what is drawn beside it and its neighbour. Beside an even chunk it comes
    // behind `drop` of the next one, whose mask it may overwrite; beside an odd one before, as it completes that mask.
    __device__ void draw_part(int chunk, int part, int parts) {
        const int drawn = chunk / 2 * 2 + 2;
        if (drawn >= chunks) return;
        constexpr int all = blocks * Draw::steps;
        const int at = chunk % 2 * parts + part;
#pragma unroll
        for (int step = at * all / (2 * parts); step < (at + 1) * all / (2 * parts); ++step) {
            const int m = step / Draw::steps;
            draws[m].advance(of, step % Draw::steps, first_row, m, first_key + drawn * 16);
        }
    }

    // A chunk of P loses what is dropped.
    __device__ void drop(HeldA<rows, cols> &p, int chunk) const {
#pragma unroll
        for (int m = 0; m < blocks; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) p.block[chunk][m][i] &= draws[m].pairs.mask(chunk % 2, i);
    }
};
