// The pass before the loop for any number of rows: what is known of rows, and their dQ in fp32, is padded to whole tiles. A
// row of the padding has lse = inf, so that its P is 0.
#pragma once
#include "23_general/panels.cuh"
#include "backward_params.cuh"
#include "dot_chunk.cuh"
#include "softmax/log2.cuh"

struct PaddedWorkspaces {
    float *lse;     // in log2
    float *delta;   // rowsum(dO * O)
    float *dq_sum;  // dQ in fp32
};

constexpr int pass_threads = 256;
// Lanes that share a row: one for 16 bytes, and so many that they divide a warp.
constexpr int row_lanes = config::head_dim <= 8 * chunk ? 8 : (config::head_dim <= 16 * chunk ? 16 : 32);

// lse and delta of a tile of rows of a head, and zeros for its dQ of `dq_cols` columns. `work` says where the rows of a
// sequence are.
template <bool has_dq = true, int dq_cols = config::head_dim, class Work, class Columns = AllColumns>
__device__ inline void prepare_tile(const Work &work, const PaddedWorkspaces &workspaces, int tile = blockIdx.x,
                                    const Columns &columns = {}) {
    constexpr int rows_per_step = pass_threads / row_lanes;
    const auto &p = work.p;
    const int head = blockIdx.y;
    const int col = threadIdx.x % row_lanes * chunk;
    const long long padded = work.padded_row(head, tile);
    const config::dtype *o = work.like_q(p.o, p.o_stride, head) + col;
    const config::dtype *dout = work.like_q(p.dout, p.dout_stride, head) + col;
    const float *lse = work.like_lse(p.lse, head), *dlse = work.dlse(head);

    float4 *dq = reinterpret_cast<float4 *>(workspaces.dq_sum + padded * dq_cols);
    if constexpr (has_dq)
#pragma unroll
        for (int i = threadIdx.x; i < config::block_m * dq_cols / 4; i += pass_threads) dq[i] = {};

#pragma unroll
    for (int step = 0; step < config::block_m; step += rows_per_step) {
        const int in_tile = step + threadIdx.x / row_lanes, row = tile * config::block_m + in_tile;
        const bool is_row = row < work.rows();
        float sum = 0.0f;
        if (is_row && col < config::head_dim_v && columns.has(col)) sum = dot_chunk<Work::has_dsinks>(o + row * p.o_stride.row, dout + row * p.dout_stride.row);
#pragma unroll
        for (int other = row_lanes / 2; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffff, sum, other);
        if (col == 0 && in_tile < config::block_m) {
            const float of_row = is_row ? lse[row] : -INFINITY;
            if (dlse != nullptr && of_row != -INFINITY) sum -= dlse[row];
            if (is_row) work.pull_sink(head, row, of_row, sum);
            workspaces.delta[padded + in_tile] = sum;
            workspaces.lse[padded + in_tile] = of_row == -INFINITY ? INFINITY : of_row * log2_e;  // no key: P = 0
        }
    }
}
