// The tiles of the rungs for Hopper, and what is done with them by warpgroups of 64 keys each.
#pragma once
#include "23_general/panels.cuh"
#include "backward_params.cuh"
#include "dq_fragments.cuh"
#include "epilogue/store.cuh"
#include "row_numbers.cuh"
#include "softmax/online.cuh"
#include "tile/warpgroup_gemm.cuh"

constexpr int num_groups = config::block_n / warpgroup_rows;

using QTile = SwizzledPanels<config::block_m, config::head_dim>;  // of Q and dO
using KTile = SwizzledPanels<config::block_n, config::head_dim>;  // of K and V
using STile = SwizzledPanels<config::block_n, config::block_m>;   // of dS^T

// A part of a tile of dQ, of a warpgroup: 64 rows and 64 columns. Together they have either all rows, or all columns.
constexpr int dq_cols = 64;
constexpr int dq_parts = config::block_m / 64 * QTile::panels;
struct DqPart {
    int row, col;

    __device__ explicit DqPart(int group) : row(group * 64 % config::block_m), col(group * 64 / config::block_m * 64) {}
};

// A step: 64 rows of Q by the 64 keys of a warpgroup, 16 keys a warp. More rows would take more registers.
constexpr int step_rows = 64;
using Scores = Accumulator<16, step_rows>;
using ScoresOperand = HeldA<16, step_rows>;

// P^T = 2^(unit * S^T - lse)
__device__ inline void probabilities(Scores &s, float unit, const float *lse) {
    each_row_of_q(s, lse, [&](float &score, float row_lse) { score = exp2_approx(unit * score - row_lse); });
}

// dS^T = P^T * (dP^T - delta), in the place of dP^T
__device__ inline void score_gradients(Scores &dp, const Scores &p, const float *delta) {
    each_row_of_q(dp, delta, [](float &gradient, float row_delta) { gradient -= row_delta; });
#pragma unroll
    for (int n = 0; n < step_rows / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) dp.block[0][n][i] *= p.block[0][n][i];
}

// The same with P^T as it was rounded, which takes half the registers; dP^T may have to be larger.
template <class T>
__device__ inline void score_gradients(Scores &dp, const ScoresOperand &p, const float *delta, float rescale = 1.0f) {
    each_row_of_q(dp, delta, [&](float &gradient, float row_delta) { gradient = rescale * gradient - row_delta; });
#pragma unroll
    for (int step = 0; step < step_rows / 16; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const T *pair = reinterpret_cast<const T *>(&p.block[step][0][i]);
            float (&of)[4] = dp.block[0][step * 2 + i / 2];
            of[i % 2 * 2] *= static_cast<float>(pair[0]);
            of[i % 2 * 2 + 1] *= static_cast<float>(pair[1]);
        }
}

// Writes dS^T of a warp to shared memory, 16 x 16 at a time; `place` has the lane's address in the first of the tiles.
template <class T>
__device__ inline void store_scores(const HoistedReader<STile, T> &place, int tile, int first_row, const ScoresOperand &ds) {
#pragma unroll
    for (int step = 0; step < step_rows / 16; ++step)
        stmatrix_x4(place.address(0, first_row + step * 16) + tile * STile::size * sizeof(T), ds.block[step][0]);
}

// dV or dK of a warp, in the place of its rows of V or K, which nobody reads any more, and from there to global memory.
template <class Tile = KTile, class T, class Columns = AllColumns>
__device__ inline void store_keys(T *shared, int warp_key, T *global, long long row_stride, int first_key, int end_key,
                                  const Accumulator<16, Tile::cols> &sum, const Columns &columns = {}) {
    store_to_shared_hoisted<Tile>(shared, warp_key, sum);
    __syncwarp();
    store_rows_before<Tile, 16, StoreDefault>(end_key, global + first_key * row_stride, row_stride, shared, warp_key, columns);
}

constexpr int finish_threads = dq_parts * warpgroup_threads;

// The last pass: a warp's sums of dQ are scaled and rounded, and the CTA's tile is stored, as far as there are rows.
template <class T, class Columns = AllColumns>
__device__ inline void finish_tile(float softmax_scale, Accumulator<16, dq_cols> dq, T *shared, T *global, long long row_stride,
                                   int end_row, const Columns &columns = {}) {
    constexpr int warps = finish_threads / 32, rows = config::block_m / warps / 4 * 4;  // that a warp stores at a time
    const DqPart part{warpgroup_index()};
    scale(dq, softmax_scale);
    store_block_to_shared<QTile>(shared, part.row + warp_index() % 4 * 16, part.col, dq);
    __syncthreads();  // the tile is whole
#pragma unroll
    for (int step = 0; step < config::block_m; step += warps * rows) {
        const int row = step + warp_index() * rows;
        if (config::block_m % (warps * rows) != 0 && row >= config::block_m) break;
        store_rows_before<QTile, rows, StoreDefault>(end_row, global, row_stride, shared, row, columns);
    }
}
template <class T>
__device__ inline void finish_tile(const BackwardParams &p, Accumulator<16, dq_cols> dq, T *shared) {
    const int first_row = blockIdx.x * config::block_m;
    finish_tile(p.softmax_scale, dq, shared, head_of(p.dq, p.dq_stride, blockIdx.z, blockIdx.y) + first_row * p.dq_stride.row,
                p.dq_stride.row, p.seqlen_q - first_row);
}
