// The passes around the loop for any number of rows: what is known of rows, and their dQ in fp32, is padded to whole tiles.
// A row of the padding has lse = inf, so that its P is 0.
#pragma once
#include "backward_params.cuh"
#include "dot_chunk.cuh"
#include "softmax/log2.cuh"

struct PaddedWorkspaces {
    float *lse;     // in log2
    float *delta;   // rowsum(dO * O)
    float *dq_sum;  // dQ in fp32
};
FLASHLADDER_WORKSPACE(lse_log2, float, "batch * num_heads * cdiv(seqlen_q, block_m) * block_m");
FLASHLADDER_WORKSPACE(delta, float, "batch * num_heads * cdiv(seqlen_q, block_m) * block_m");
FLASHLADDER_WORKSPACE(dq_sum, float, "batch * num_heads * cdiv(seqlen_q, block_m) * block_m * head_dim");

// The first row of a tile among the padded rows of all heads.
__device__ inline long long padded_row(const BackwardParams &p, int batch, int head, int tile) {
    const int tiles = (p.seqlen_q + config::block_m - 1) / config::block_m;
    return ((static_cast<long long>(batch) * p.num_heads + head) * tiles + tile) * config::block_m;
}

constexpr int pass_threads = 256;
// Lanes that share a row: one for 16 bytes, and so many that they divide a warp.
constexpr int row_lanes = config::head_dim <= 8 * chunk ? 8 : config::head_dim <= 16 * chunk ? 16 : 32;

// lse and delta of a tile of rows, and zeros for its dQ.
__device__ inline void prepare_tile(const BackwardParams &p, const PaddedWorkspaces &workspaces) {
    constexpr int rows_per_step = pass_threads / row_lanes;
    const int tile = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
    const int col = threadIdx.x % row_lanes * chunk;
    const long long padded = padded_row(p, batch, head, tile);
    const config::dtype *o = head_of(p.o, p.o_stride, batch, head) + col;
    const config::dtype *dout = head_of(p.dout, p.dout_stride, batch, head) + col;
    const float *lse = p.lse + (static_cast<long long>(batch) * p.num_heads + head) * p.seqlen_q;

    float4 *dq = reinterpret_cast<float4 *>(workspaces.dq_sum + padded * config::head_dim);
#pragma unroll
    for (int i = threadIdx.x; i < config::block_m * config::head_dim / 4; i += pass_threads) dq[i] = {};

#pragma unroll
    for (int step = 0; step < config::block_m; step += rows_per_step) {
        const int in_tile = step + threadIdx.x / row_lanes, row = tile * config::block_m + in_tile;
        const bool is_row = row < p.seqlen_q;
        float sum = 0.0f;
        if (is_row && col < config::head_dim) sum = dot_chunk(o + row * p.o_stride.row, dout + row * p.dout_stride.row);
#pragma unroll
        for (int other = row_lanes / 2; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffff, sum, other);
        if (col == 0 && in_tile < config::block_m) {
            const float of_row = is_row ? lse[row] : -INFINITY;
            workspaces.delta[padded + in_tile] = sum;
            workspaces.lse[padded + in_tile] = of_row == -INFINITY ? INFINITY : of_row * log2_e;  // no key: P = 0
        }
    }
}
