// What a CTA reads and writes: a part of a sequence's keys, and what that part comes to.
#pragma once
#include "decode/cuda/packed_rows.cuh"
#include "decode/cuda/pages.cuh"
#include "decode/cuda/partials.cuh"
#include "shared_softmax.cuh"

constexpr float lse_of_no_key = INFINITY;  // as FlashMLA writes it

// The CTA's tile of rows is blockIdx.x.
template <int rows, int block_n, bool causal, class Params = CacheParams>
struct LatentPart {
    const Params &params;
    PackedRows<rows> tile;
    int number, all_keys;  // among all parts; of the sequence
    int begin, end;        // keys of the part that any row sees

    // Part `number_` of all has blocks from `first_block` to before `next_block` of a sequence.
    __device__ LatentPart(const Params &params_, int sequence, int head_k, int number_, int first_block, int next_block)
        : params(params_),
          tile{params, int(blockIdx.x), head_k, sequence},
          number(number_),
          all_keys(params.keys_of(sequence)),
          begin(first_block * block_n),
          end(min(tile.template keys_seen<causal>(all_keys), next_block * block_n)) {}

    // One of num_splits of each sequence. Head of K and split: blockIdx.y; sequence: blockIdx.z.
    __device__ explicit LatentPart(const Params &params)
        : LatentPart(params, blockIdx.z, blockIdx.y % params.num_heads_k, split(params) * params.batch + blockIdx.z,
                     params.first_block(blocks(params), split(params)),
                     params.first_block(blocks(params), split(params) + 1)) {}

    // Keys that packed row i sees.
    __device__ int seen(int i) const { return tile.template keys_seen<causal>(all_keys, i); }

    // Starts copying a block of keys. Zeros lie behind the last one: P is 0 there, and 0 * V must be 0.
    template <class Tile, class T>
    __device__ void copy(T *shared, int first) const {
        constexpr int chunk = 8;  // elements of 16 bytes
        const TensorStride at = params.k_cache_stride;
        const T *cache = static_cast<const T *>(params.k_cache) + tile.head_k * at.head;
        for (int i = threadIdx.x * chunk; i < Tile::rows * Tile::cols; i += blockDim.x * chunk) {
            const int r = i / Tile::cols, col = i % Tile::cols;
            const KeyPlace place = KeyPlace::find(params, tile.batch, first + r, end);
            cp_async_16_or_zeros(shared_address(shared + Tile::offset(r, col)),
                                 cache + place.page * at.batch + place.row * at.row + col, first + r < end);
        }
    }

    // Writes the warp's columns of O, from `first_col` on, as if there were no other keys; one warp of each row writes
    // its log-sum-exp. `softmax` has its sums.
    template <class Softmax, int cols>
    __device__ void store(const Partials &partials, const Softmax &softmax, const Accumulator<16, cols> &o, int first_col,
                          int head_dim_v) const {
        each_row(softmax, [&](int h, int i, float inverse) {
            if (!tile.has(i)) return;
            const long long at = params.row_index(number, tile.head(i), tile.row(i));
            float *to = partials.o + at * head_dim_v + first_col + accumulator_col();
#pragma unroll
            for (int n = 0; n < cols / 8; ++n)
                *reinterpret_cast<float2 *>(to + n * 8) =
                    make_float2(o.block[0][n][2 * h] * inverse, o.block[0][n][2 * h + 1] * inverse);
            if (softmax.party == 0 && lane_index() % 4 == 0) partials.lse[at] = softmax.lse(h);
        });
    }

    // The same to shared memory, where other CTAs read it.
    template <class CtaPart, class Softmax, int cols>
    __device__ void put(CtaPart &to, const Softmax &softmax, const Accumulator<16, cols> &o, int first_col) const {
        each_row(softmax, [&](int h, int, float inverse) {
            float *row = &to.o[softmax.row(h)][first_col + accumulator_col()];
#pragma unroll
            for (int n = 0; n < cols / 8; ++n)
                *reinterpret_cast<float2 *>(row + n * 8) =
                    make_float2(o.block[0][n][2 * h] * inverse, o.block[0][n][2 * h + 1] * inverse);
            if (softmax.party == 0 && lane_index() % 4 == 0) to.lse[softmax.row(h)] = softmax.lse(h);
        });
    }

    // O and the log-sum-exp where there are no other keys. The lanes that have a row's columns store 64 bytes together.
    template <class T, class Softmax, int cols>
    __device__ void store_whole(const Softmax &softmax, const Accumulator<16, cols> &o, int first_col) const {
        each_row(softmax, [&](int h, int i, float inverse) {
            T *to = tile.template element<T>(params.o, params.o_stride, i) + first_col + lane_index() % 4 * 8;
#pragma unroll
            for (int n = 0; n < cols / 8; n += 4) {
                uint32_t two[4];  // columns of each block
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    two[k] = pack<T>(o.block[0][n + k][2 * h] * inverse, o.block[0][n + k][2 * h + 1] * inverse);
                const uint4 eight = row_of_block(two);
                if (tile.has(i)) *reinterpret_cast<uint4 *>(to + n * 8) = eight;
            }
            if (tile.has(i) && params.lse != nullptr && softmax.party == 0 && lane_index() % 4 == 0)
                params.lse[params.row_index(tile.batch, tile.head(i), tile.row(i))] =
                    or_of_no_key(softmax.lse(h), lse_of_no_key);
        });
    }

  private:
    __device__ static int split(const Params &params) { return blockIdx.y / params.num_heads_k; }
    __device__ static int blocks(const Params &params) {
        return (params.keys_of(blockIdx.z) + block_n - 1) / block_n;
    }

    // Lane q of four has columns 2q and 2q + 1 of four blocks of 8. Afterwards it has all columns of block q.
    __device__ static uint4 row_of_block(const uint32_t (&two)[4]) {
        const bool odd = lane_index() & 1, high = lane_index() & 2;
        auto swap = [](uint32_t sent, int lanes) { return __shfl_xor_sync(0xffffffff, sent, lanes); };
        uint32_t left[2], right[2];  // of the two lanes that differ in `odd`
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const uint32_t other = swap(odd ? two[2 * k] : two[2 * k + 1], 1);
            left[k] = odd ? other : two[2 * k];
            right[k] = odd ? two[2 * k + 1] : other;
        }
        const uint32_t other_left = swap(high ? left[0] : left[1], 2), other_right = swap(high ? right[0] : right[1], 2);
        return high ? make_uint4(other_left, other_right, left[1], right[1])
                    : make_uint4(left[0], right[0], other_left, other_right);
    }

    // The lane's rows, which may not be there, and the reciprocals of their sums.
    template <class Softmax, class Row>
    __device__ void each_row(const Softmax &softmax, Row row) const {
        Softmax::each_row([&](int h) {
            const int i = softmax.row(h);
            const float sum = softmax.l[0][h];
            row(h, i, sum > 0.0f ? 1.0f / sum : 0.0f);
        });
    }
};
