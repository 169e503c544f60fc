// The first pass with 16 bytes a lane, and lse in log2, as the exponential unit works.
#pragma once
#include "backward.cuh"
#include "dot_chunk.cuh"
#include "softmax/log2.cuh"

struct Log2Workspaces : Workspaces {
    float *lse;  // in log2
};
FLASHLADDER_WORKSPACE(lse_log2, float, "batch * num_heads * seqlen_q");

// delta and lse of a row, and zeros for its dQ.
__device__ inline void prepare_row_log2(const BackwardParams &p, const Log2Workspaces &workspaces) {
    const PassRow at{p};
    if (at.row == p.seqlen_q) return;
    const config::dtype *o = head_of(p.o, p.o_stride, at.batch, at.head) + at.row * p.o_stride.row;
    const config::dtype *dout = head_of(p.dout, p.dout_stride, at.batch, at.head) + at.row * p.dout_stride.row;
    float sum = 0.0f;
    for (int col = at.lane * chunk; col < config::head_dim; col += 32 * chunk) sum += dot_chunk(o + col, dout + col);
    for (int col = at.lane * 4; col < config::head_dim; col += 32 * 4)
        *reinterpret_cast<float4 *>(workspaces.dq_sum + at.place * config::head_dim + col) = {};
#pragma unroll
    for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffff, sum, other);
    if (at.lane != 0) return;
    workspaces.delta[at.place] = sum;
    workspaces.lse[at.place] = p.lse[at.place] * log2_e;
}
