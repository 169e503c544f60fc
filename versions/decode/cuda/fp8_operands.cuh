// K and V in 8-bit floats, e4m3, as operands of 16-bit products. In shared memory two neighbouring columns are one 16-bit
// element, as ldmatrix moves no single bytes. Which columns of a tile an mma sees as neighbours, is chosen so that every
// lane gets the bytes that it needs:
//
//     S = Q K^T   A lane has four neighbouring columns in a step of 16, where mma says 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
//                 The sum over columns is in any order the same sum, if Q has the same one.
//     O = P V     A lane has two neighbouring columns of two keys. The first ones of all lanes are a block of 8 columns
//                 of O, the second ones the next.
#pragma once
#include "decode_softmax.cuh"
#include "ptx/sm89.cuh"
#include "tile/gemm.cuh"

// Two e4m3 in the lower half of `pair`, as two T: no bit is lost.
template <class T>
__device__ uint32_t widen(uint32_t pair);

template <>
__device__ inline uint32_t widen<__half>(uint32_t pair) {
    return e4m3x2_to_f16x2(pair);
}
template <>
__device__ inline uint32_t widen<__nv_bfloat16>(uint32_t pair) {
    const uint32_t halves = e4m3x2_to_f16x2(pair);
    const float2 both = __half22float2(reinterpret_cast<const __half2 &>(halves));
    return pack<__nv_bfloat16>(both.x, both.y);
}

__device__ inline const uint16_t *pairs(const uint8_t *columns) { return reinterpret_cast<const uint16_t *>(columns); }

// Q in registers, with the columns of a step as K has them.
template <int k>
struct Fp8QOperand : HeldA<16, k> {
    template <class Tile, class T>
    __device__ void start(const T *tile) {
#pragma unroll
        for (int step = 0; step < k / 16; ++step)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int col = step * 16 + lane_index() % 4 * 4;
                const T *four = tile + Tile::offset(h * 8 + accumulator_row(), col);
                const uint2 columns = *reinterpret_cast<const uint2 *>(four);
                this->block[step][0][h] = columns.x, this->block[step][0][2 + h] = columns.y;
            }
    }
};

// K, n keys of k columns.
template <class T, int n, int k, class Tile>
struct Fp8KOperand {
    KOperand<n, k / 2, 0, HoistedReader<Tile, uint16_t, ByRow>> pairs;

    __device__ void start(const uint16_t *tile) { pairs.reader.start(tile); }
    __device__ void fetch(int step) {
        if (step % 2 == 0) pairs.fetch(step / 2);
    }
    __device__ uint32_t at(int step, int n8, int half) const {
        return widen<T>(pairs.at(step / 2, n8, step % 2) >> 16 * half);
    }
};

// V, k keys of n columns.
template <class T, int n, int k, class Tile>
struct Fp8VOperand {
    VOperand<n / 2, k, 2, HoistedReader<Tile, uint16_t>> pairs;

    __device__ void start(const uint16_t *tile) { pairs.reader.start(tile); }
    __device__ void fetch(int step) { pairs.fetch(step); }
    __device__ uint32_t at(int step, int n8, int half) const {
        const uint32_t by_column = __byte_perm(pairs.at(step, n8 / 2, half), 0, 0x3120);
        return widen<T>(by_column >> 16 * (n8 % 2));
    }
};

// Writes a row of O, whose columns are then in their order: of two blocks of them, a lane has four neighbours.
template <int cols>
__device__ inline void put_columns(const Accumulator<16, cols> &o, int h, float *row) {
#pragma unroll
    for (int n = 0; n < cols / 8; n += 2) {
        const float(&first)[4] = o.block[0][n], (&second)[4] = o.block[0][n + 1];
        *reinterpret_cast<float4 *>(row + n * 8 + lane_index() % 4 * 4) =
            make_float4(first[2 * h], second[2 * h], first[2 * h + 1], second[2 * h + 1]);
    }
}
