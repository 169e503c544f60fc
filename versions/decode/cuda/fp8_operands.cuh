// Products of 16 bits of K and V in 8-bit floats, e4m3. All are computed in f16, as which every e4m3 is exact.
//
// In shared memory two neighbouring columns are one 16-bit element, as ldmatrix moves no single bytes. Which columns an
// mma takes for neighbours is chosen so that every lane gets the bytes that it needs:
//
//     S = Q K^T   A lane has four neighbouring columns in a step of 16, where mma says 2 t, 2 t + 1, 2 t + 8, 2 t + 9. Q
//                 has the same ones: the order of a sum's terms is free.
//     O = P V     A lane has two neighbouring columns of two keys. The first ones of all lanes are 8 columns of O, the
//                 second ones the next 8.
#pragma once
#include "decode_softmax.cuh"
#include "ptx/sm89.cuh"
#include "tile/gemm.cuh"
#include "tile/rows.cuh"

// The row that another lane points to, as pairs of columns.
__device__ inline const uint16_t *pairs_of_lane(const uint8_t *row, int lane) {
    return reinterpret_cast<const uint16_t *>(__shfl_sync(0xffffffff, reinterpret_cast<unsigned long long>(row), lane));
}

// Q in registers, in f16: each row times the power of 2 that brings its largest number to 2^15. No bit is lost of a number
// that is at least 2^-32 of the largest.
template <int k>
struct Fp8QOperand : HeldA<16, k> {
    float unit[2];  // what S of the lane's rows is to be multiplied by

    template <class Tile, class T>
    __device__ void start(const T *tile) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float columns[k / 16][4], largest = 0.0f;
#pragma unroll
            for (int step = 0; step < k / 16; ++step)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int col = step * 16 + lane_index() % 4 * 4 + i;
                    columns[step][i] = tile[Tile::offset(h * 8 + accumulator_row(), col)];
                    largest = fmaxf(largest, fabsf(columns[step][i]));
                }
            constexpr uint32_t bias = 127, most = 15;
            const uint32_t exponent = max(bias + most - 126, __float_as_uint(quad_max(largest)) >> 23);
            const float scale = __uint_as_float(2 * bias + most - exponent << 23);
            unit[h] = __uint_as_float(exponent - most << 23);
#pragma unroll
            for (int step = 0; step < k / 16; ++step)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    this->block[step][0][2 * i + h] =
                        pack<__half>(columns[step][2 * i] * scale, columns[step][2 * i + 1] * scale);
        }
    }
};

// The same where Q has too many columns for registers: it is put back into its tile in shared memory, by the warp whose rows
// these are, in the order in which the products want it.
template <int k, class Tile, class T>
struct Fp8StreamedQ : QOperand<16, k, 2, HoistedReader<Tile, T>, 1> {
    float unit[2];

    __device__ void start(T *tile) {
        Fp8QOperand<k> held;
        held.template start<Tile>(tile);
        __syncwarp();  // every lane has read its columns
#pragma unroll
        for (int step = 0; step < k / 16; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                store_shared_4(shared_address(tile + Tile::offset(i % 2 * 8 + accumulator_row(),
                                                                  step * 16 + i / 2 * 8 + accumulator_col())),
                               held.block[step][0][i]);
        __syncwarp();
        each_row([&](int h) { unit[h] = held.unit[h]; });
        this->reader.start(tile);
    }
};

// K, n keys of k columns.
template <int n, int k, class Tile>
struct Fp8KOperand {
    KOperand<n, k / 2, 0, HoistedReader<Tile, uint16_t, ByRow>> pairs;

    __device__ void start(const uint16_t *tile) { pairs.reader.start(tile); }
    __device__ void fetch(int step) {
        if (step % 2 == 0) pairs.fetch(step / 2);
    }
    __device__ uint32_t at(int step, int n8, int half) const {
        return e4m3x2_to_f16x2(pairs.at(step / 2, n8, step % 2), half);
    }
};

// V, k keys of n columns.
template <int n, int k, class Tile>
struct Fp8VOperand {
    VOperand<n / 2, k, 2, HoistedReader<Tile, uint16_t>> pairs;

    __device__ void start(const uint16_t *tile) { pairs.reader.start(tile); }
    __device__ void fetch(int step) { pairs.fetch(step); }
    __device__ uint32_t at(int step, int n8, int half) const {
        const uint32_t by_column = __byte_perm(pairs.at(step, n8 / 2, half), 0, 0x3120);
        return e4m3x2_to_f16x2(by_column, n8 % 2);
    }
};

// Online softmax whose P is 2^15 at a row's maximum, so that also a small P has all bits of an f16. The maximum that it
// keeps is as much lower: l, O and the log-sum-exp come out right.
struct Fp8Softmax : DecodeSoftmax {
    using DecodeSoftmax::DecodeSoftmax;
    static constexpr float highest = 32768.0f;

    template <int keys, int head_dim>
    __device__ void update(Accumulator<16, keys> &s, Accumulator<16, head_dim> &o) {
        each_row([&](int b, int h) { raise(fmaxf(m[b][h], quad_max(lane_max(s, b, h)) * unit - 15.0f), o, b, h); });
        exponentiate(s, l);
    }
};

// Visits a row of O, whose columns are then in their order: of two blocks of them, a lane has four neighbours.
template <int cols, class Visit>
__device__ inline void each_four_columns(const Accumulator<16, cols> &o, int h, Visit visit) {
#pragma unroll
    for (int n = 0; n < cols / 8; n += 2) {
        const float (&first)[4] = o.block[0][n], (&second)[4] = o.block[0][n + 1];
        visit(n * 8 + lane_index() % 4 * 4, make_float4(first[2 * h], second[2 * h], first[2 * h + 1], second[2 * h + 1]));
    }
}

// Writes a row of O.
template <int cols>
__device__ inline void put_columns(const Accumulator<16, cols> &o, int h, float *row) {
    each_four_columns(o, h, [&](int col, float4 x) { *reinterpret_cast<float4 *>(row + col) = x; });
}
