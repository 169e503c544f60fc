// Rows of a cache of latents that lie anywhere, in 8 or in 16 bits.
//
// A row in 8 bits has 656 bytes: 512 e4m3, four fp32 scales, each of 128 of these, and the 64 columns that are K's alone in
// 16 bits.
#pragma once
#include "latents.cuh"
#include "ptx/sm89.cuh"

constexpr int scales_at = 512, rotated_at = 528;  // bytes of a row in 8 bits
constexpr int warp_rows = 16;                     // of a block, that a warp reads

// Row indices[sequence][i] of all pages is key i of a sequence, which has up to seqlen_k. One that is none is not read.
struct ListedParams : SplitParams {
    const int *indices;
    int page_size, num_pages;
    FLASHLADDER_FURTHER_FIELDS(SplitParams, indices, page_size, num_pages)
};
using RowParams = std::conditional_t<config::sparse, ListedParams, CacheParams>;

// The place of a key. Where there is none, the page is -1.
__device__ inline KeyPlace place_of(const ListedParams &params, int sequence, int key, int end) {
    const unsigned rows = static_cast<unsigned>(params.num_pages) * params.page_size;
    const unsigned row = key < end ? params.indices[sequence * static_cast<long long>(params.seqlen_k) + key] : ~0u;
    if (row >= rows) return {-1, 0};
    const unsigned page = row / params.page_size;
    return {static_cast<int>(page), static_cast<int>(row - page * params.page_size)};
}
template <class Params>
__device__ inline KeyPlace place_of(const Params &params, int sequence, int key, int end) {
    return key < end ? KeyPlace::find(params, sequence, key, end) : KeyPlace{-1, 0};
}

// A warp's rows of a block. Lane l knows where row l % rows begins, null where there is none.
struct WarpRows {
    const char *row;

    // From key `first` of a part on, of elements of `bytes` bytes. `lane` is lane_index(), as the caller keeps it.
    template <int bytes, int rows = warp_rows, class Part>
    __device__ static WarpRows find(const Part &part, int first, int lane) {
        const KeyPlace place = place_of(part.params, part.tile.batch, first + lane % rows, part.end);
        const TensorStride at = part.params.k_cache_stride;
        const long long element = place.page * at.batch + place.row * at.row + part.tile.head_k * at.head;
        return {place.page >= 0 ? static_cast<const char *>(part.params.k_cache) + element * bytes : nullptr};
    }
    __device__ const char *of(int i) const {
        return reinterpret_cast<const char *>(__shfl_sync(0xffffffff, reinterpret_cast<long long>(row), i));
    }
    // Bit i: row i % rows is there.
    __device__ unsigned there() const { return __ballot_sync(0xffffffff, row != nullptr); }
};

// The scales of a warp's rows. Lane l has scale l % 4 of rows l / 4 and l / 4 + 8.
struct WarpScales {
    float scale[2];

    __device__ void load(const WarpRows &rows, int lane) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const char *row = rows.of(i * 8 + lane / 4);
            scale[i] = row ? *reinterpret_cast<const float *>(row + scales_at + lane % 4 * 4) : 0.0f;
        }
    }
    // That of columns 128 * i and the next 127. Lanes may ask for other columns, and for rows of the same half.
    __device__ float of(int half, int row, int i) const { return __shfl_sync(0xffffffff, scale[half], row * 4 + i); }
};

// Eight e4m3, each times the scale, rounded once.
template <class T>
__device__ inline uint4 widened(uint2 eight, float scale) {
    auto two = [&](uint32_t of, int half) {
        const uint32_t bits = e4m3x2_to_f16x2(of, half);
        const float2 values = __half22float2(reinterpret_cast<const __half2 &>(bits));
        return pack<T>(values.x * scale, values.y * scale);
    };
    return {two(eight.x, 0), two(eight.x, 1), two(eight.y, 0), two(eight.y, 1)};
}
