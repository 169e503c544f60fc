"""A second ladder, of another operation: delta = rowsum(dO * O), which backward passes need. For tests alone."""

from pathlib import Path

from tiny_ladder import make_rung

from flashladder.common.problem.buffers import contiguous
from flashladder.common.problem.operations import Operation
from flashladder.common.problem.operations.forward import laid_out


class Delta(Operation):
    """o and dout are (batch, seqlen_q, heads, head_dim); delta is (batch, heads, seqlen_q), fp32."""

    name = "delta"
    inputs = ("o", "dout")
    outputs = ("delta",)
    fp32 = ("delta",)
    signed_together = (("o", "dout"),)

    def flops(self, problem):
        return 2.0 * problem.batch * problem.num_heads * problem.seqlen_q * problem.head_dim

    def views(self, problem):
        p = problem
        o = laid_out(p.layout, (p.batch, p.seqlen_q, p.num_heads, p.head_dim))
        return [{"o": o}, {"dout": o}, {"delta": contiguous(p.batch, p.num_heads, p.seqlen_q)}]

    def compute(self, problem, tensors, dtype):
        return {"delta": (tensors["o"].to(dtype) * tensors["dout"].to(dtype)).sum(-1).transpose(1, 2)}


VERSION_YAML = """
title: Rows
idea: A thread a row.
instruction_set: ampere
operation: delta
supports: {dtype: [bf16, fp16], head_dim: [64]}
config:
  block_m: {default: 32, values: [32, 64]}
"""

# What both rungs begin with.
HEAD = """
#include "config.cuh"
#include "launch.cuh"
#include "params.cuh"
using namespace config;

struct DeltaParams {
    const dtype *o, *dout;
    float *delta;
    TensorStride o_stride, dout_stride;
    int batch, num_heads, num_heads_k, seqlen_q, seqlen_k;
    float softmax_scale;
    FLASHLADDER_FIELDS(o, dout, delta, o_stride, dout_stride, batch, num_heads, num_heads_k, seqlen_q, seqlen_k,
                       softmax_scale)
};

__device__ float dot(const DeltaParams &p, int batch, int head, int row, int begin, int end) {
    const dtype *o = p.o + batch * p.o_stride.batch + head * p.o_stride.head + row * p.o_stride.row;
    const dtype *dout = p.dout + batch * p.dout_stride.batch + head * p.dout_stride.head + row * p.dout_stride.row;
    float sum = 0;
    for (int i = begin; i < end; ++i) sum += static_cast<float>(o[i]) * static_cast<float>(dout[i]);
    return sum;
}

__device__ int place(const DeltaParams &p, int batch, int head, int row) {
    return (batch * p.num_heads + head) * p.seqlen_q + row;
}
"""

ROWS = """
FLASHLADDER_KERNEL(attention_delta, DeltaParams, Launch{block_m, 0, block_m});
extern "C" __global__ void attention_delta(const __grid_constant__ DeltaParams p) {
    const int row = blockIdx.x * block_m + threadIdx.x;
    if (row < p.seqlen_q)
        p.delta[place(p, blockIdx.z, blockIdx.y, row)] = dot(p, blockIdx.z, blockIdx.y, row, 0, head_dim);
}
"""

# Two kernels: one sums halves of rows, the other, a persistent one whose CTAs draw tiles, adds them up.
HALVES = """
struct Lent {
    float *halves;
    unsigned *next;
};
FLASHLADDER_WORKSPACE(halves, float, "2 * batch * num_heads * seqlen_q");
FLASHLADDER_COUNTERS(next, "1");

FLASHLADDER_KERNEL(half_rows, DeltaParams,
                   Launch{block_m, 0, block_m}.over("cdiv(seqlen_q, block_m)", "2 * num_heads", "batch"));
extern "C" __global__ void half_rows(const __grid_constant__ DeltaParams p, const __grid_constant__ Lent lent) {
    const int row = blockIdx.x * block_m + threadIdx.x, head = blockIdx.y / 2, half = blockIdx.y % 2;
    if (row < p.seqlen_q)
        lent.halves[2 * place(p, blockIdx.z, head, row) + half] =
            dot(p, blockIdx.z, head, row, half * head_dim / 2, (half + 1) * head_dim / 2);
}

FLASHLADDER_KERNEL(attention_delta, DeltaParams, Launch{block_m, 0, block_m}.persistent());
extern "C" __global__ void attention_delta(const __grid_constant__ DeltaParams p, const __grid_constant__ Lent lent) {
    __shared__ int drawn;
    const int blocks = (p.seqlen_q + block_m - 1) / block_m;
    while (true) {
        if (threadIdx.x == 0) drawn = atomicInc(lent.next, blocks * p.num_heads * p.batch + gridDim.x - 1);
        __syncthreads();
        const int tile = drawn, head = tile / blocks % p.num_heads, batch = tile / blocks / p.num_heads;
        if (batch >= p.batch) return;
        const int row = min(tile % blocks * block_m + threadIdx.x, p.seqlen_q - 1);  // the last one more than once
        const int at = place(p, batch, head, row);
        p.delta[at] = lent.halves[2 * at] + lent.halves[2 * at + 1];
        __syncthreads();
    }
}
"""


def make_ladder(root: Path) -> None:
    """Writes versions/delta of a folder of ladders: 00_rows and 01_halves."""
    make_rung(root, "delta/00_rows", VERSION_YAML, HEAD + ROWS)
    make_rung(root, "delta/01_halves", VERSION_YAML.replace("Rows", "Halves"), HEAD + HALVES)
