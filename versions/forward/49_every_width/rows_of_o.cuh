// A warp's rows of O on their way to global memory: by TMA from where Q was, or from registers, so that O takes no place in
// shared memory.
#pragma once
#include "24_woven_general/narrower.cuh"
#include "epilogue/store_by_tma.cuh"
#include "schedule/packed.cuh"
#include "tile/fragment.cuh"
#include "schedule/work_tile.cuh"
#include "tile/rows.cuh"

// Turns words of a quad round: word i of lane j becomes word j of lane i.
__device__ inline void transpose_in_quad(uint32_t (&words)[4]) {
#pragma unroll
    for (int apart = 1; apart < 4; apart *= 2) {
        const bool is_upper = lane_index() & apart;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & apart) continue;
            uint32_t &low = words[i], &high = words[i + apart];
            const uint32_t others = __shfl_xor_sync(0xffffffff, is_upper ? low : high, apart);
            (is_upper ? low : high) = others;
        }
    }
}

// Where a row of O begins, counted in elements. Its batch, row and head are those of tensor maps.
__device__ inline long long first_of_rows(const AttentionParams &params, int batch, int row, int head) {
    const TensorStride &stride = params.o_stride;
    return batch * stride.batch + row * stride.row + head * stride.head;
}
__device__ inline long long first_of_rows(const PackedParams &params, int batch, int row, int head) {
    return (batch + row - params.total_q) * params.o_stride.row + head * params.o_stride.head;
}

// Stores the first `rows` of a warp's 16 rows, and the first `columns`, a multiple of 8; 16 bytes a lane.
template <class T, int cols>
__device__ inline void store_rows(T *to, long long row_stride, int rows, int columns, const Accumulator<16, cols> &o) {
    each_row([&](int h) {
        const int row = h * 8 + accumulator_row(), col = lane_index() % 4 * 8;
        T *place = to + row * row_stride + col;
#pragma unroll
        for (int n = 0; n < cols / 8; n += 4) {
            uint32_t words[4];  // of four blocks; then of the lane's own one
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i] = pack<T>(o.block[0][n + i][2 * h], o.block[0][n + i][2 * h + 1]);
            transpose_in_quad(words);
            if (row < rows && n * 8 + col < columns) store_global_16(place + n * 8, {words[0], words[1], words[2], words[3]});
        }
    });
}

template <bool by_tma>
struct RowsOfO {
    int row, head, batch;  // of a warp's first row, as tensor maps count them

    __device__ void take(const WorkTileReader &work, int first_row) {
        row = work.get(&WorkTile::row_q) + first_row;
        head = work.get(&WorkTile::head), batch = work.get(&WorkTile::batch_q);
    }
    // Rows from `warp_row` on of a tile whose place in shared memory is free. `rows` of them are within the sequence.
    template <class Tile, class T, class Params, class Maps, int cols>
    __device__ void store(T *tile, int warp_row, int rows, const Params &params, const Maps &maps, const Accumulator<16, cols> &o) const {
        if constexpr (by_tma)
            start_store<Tile>(tile, warp_row, o, maps.o, row, head, batch);
        else
            store_rows(static_cast<T *>(params.o) + first_of_rows(params, batch, row, head), params.o_stride.row, rows,
                       params.head_dim_v, o);
    }
};
