// What a CTA reads and writes: a part of a sequence's keys, and what that part comes to.
#pragma once
#include "decode/cuda/packed_rows.cuh"
#include "decode/cuda/pages.cuh"
#include "shared_softmax.cuh"

// The CTA's rows, blockIdx.x; its head of K and its part of the keys, blockIdx.y; its sequence, blockIdx.z.
template <int rows, int block_n, bool causal>
struct Part {
    const CacheParams &params;
    int split;
    PackedRows<rows> tile;
    int all_keys, begin, end;  // of the sequence; those of the part that any row sees

    __device__ explicit Part(const CacheParams &params_)
        : params(params_),
          split(blockIdx.y / params.num_heads_k),
          tile{params, int(blockIdx.x), int(blockIdx.y % params.num_heads_k), int(blockIdx.z)},
          all_keys(params.keys_of(tile.batch)) {
        const int blocks = (all_keys + block_n - 1) / block_n;
        begin = params.first_block(blocks, split) * block_n;
        end = min(tile.template keys_seen<causal>(all_keys), params.first_block(blocks, split + 1) * block_n);
    }

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
        Softmax::each_row([&](int h) {
            const int i = softmax.row(h);
            if (!tile.has(i)) return;
            const float sum = softmax.l[0][h], inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
            const long long at = params.row_index(split * params.batch + tile.batch, tile.head(i), tile.row(i));
            float *to = partials.o + at * head_dim_v + first_col + accumulator_col();
#pragma unroll
            for (int n = 0; n < cols / 8; ++n)
                *reinterpret_cast<float2 *>(to + n * 8) =
                    make_float2(o.block[0][n][2 * h] * inverse, o.block[0][n][2 * h + 1] * inverse);
            if (softmax.party == 0 && lane_index() % 4 == 0) partials.lse[at] = softmax.lse(h);
        });
    }
};
