// The memory that a rung is lent, and the passes around its loop.
#pragma once
#include "backward_params.cuh"

// The first pass: delta = rowsum(dO * O), one number a row, so that O need not travel again; and dQ, in fp32, is zero
// before anybody adds to it. The last pass: dQ is rounded.
struct Workspaces {
    float *delta;   // (batch, num_heads, seqlen_q)
    float *dq_sum;  // (batch, num_heads, seqlen_q, head_dim)
};
FLASHLADDER_WORKSPACE(delta, float, "batch * num_heads * seqlen_q");
FLASHLADDER_WORKSPACE(dq_sum, float, "batch * num_heads * seqlen_q * head_dim");

constexpr int pass_rows = 8;  // of a CTA of a pass: a warp a row
constexpr int pass_threads = 32 * pass_rows;

// The row of a head that a warp of a pass has. Without one it has row `seqlen_q`.
struct PassRow {
    int batch, head, row, lane;
    long long place;  // among the rows of all heads

    __device__ explicit PassRow(const BackwardParams &p)
        : batch(blockIdx.z), head(blockIdx.y),
          row(min(static_cast<int>(blockIdx.x * pass_rows + threadIdx.x / 32), p.seqlen_q)), lane(threadIdx.x % 32),
          place((static_cast<long long>(batch) * p.num_heads + head) * p.seqlen_q + row) {}
};

// Declares either pass: FLASHLADDER_KERNEL(backward_prepare, BackwardParams, pass_launch).
constexpr Launch pass_launch =
    Launch{pass_threads, 0, pass_rows}.over("cdiv(seqlen_q, block_m)", "num_heads", "batch");

__device__ inline void prepare_row(const BackwardParams &p, const Workspaces &workspaces) {
    const PassRow at{p};
    if (at.row == p.seqlen_q) return;
    const config::dtype *o = head_of(p.o, p.o_stride, at.batch, at.head) + at.row * p.o_stride.row;
    const config::dtype *dout = head_of(p.dout, p.dout_stride, at.batch, at.head) + at.row * p.dout_stride.row;
    float sum = 0.0f;
    for (int col = at.lane; col < config::head_dim; col += 32) {
        sum += static_cast<float>(o[col]) * static_cast<float>(dout[col]);
        workspaces.dq_sum[at.place * config::head_dim + col] = 0.0f;
    }
    for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffff, sum, other);
    if (at.lane == 0) workspaces.delta[at.place] = sum;
}

__device__ inline void finish_row(const BackwardParams &p, const Workspaces &workspaces) {
    const PassRow at{p};
    if (at.row == p.seqlen_q) return;
    config::dtype *dq = head_of(p.dq, p.dq_stride, at.batch, at.head) + at.row * p.dq_stride.row;
    for (int col = at.lane; col < config::head_dim; col += 32)
        dq[col] = static_cast<config::dtype>(workspaces.dq_sum[at.place * config::head_dim + col] * p.softmax_scale);
}
