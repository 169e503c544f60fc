// Two kernels: one sums halves of rows, the other, a persistent one whose CTAs draw tiles, adds them up.
#include "row_dots.cuh"
using namespace config;

struct Workspaces {
    float *halves;
    unsigned *next;
};
FLASHLADDER_WORKSPACE(halves, float, "2 * batch * num_heads * seqlen_q");
FLASHLADDER_COUNTERS(next, "1");

FLASHLADDER_KERNEL(half_rows, RowDotsParams,
                   Launch{block_m, 0, block_m}.over("cdiv(seqlen_q, block_m)", "2 * num_heads", "batch"));
extern "C" __global__ void half_rows(const __grid_constant__ RowDotsParams p,
                                     const __grid_constant__ Workspaces workspaces) {
    const int row = blockIdx.x * block_m + threadIdx.x, head = blockIdx.y / 2, half = blockIdx.y % 2;
    const int place = (blockIdx.z * p.num_heads + head) * p.seqlen_q + row;
    if (row < p.seqlen_q)
        workspaces.halves[2 * place + half] =
            dot(p, blockIdx.z, head, row, half * head_dim_v / 2, (half + 1) * head_dim_v / 2);
}

FLASHLADDER_KERNEL(attention_row_dots, RowDotsParams,
                   Launch{block_m, 0, block_m}
                       .over("cdiv(cdiv(seqlen_q, segment), block_m)", "num_heads", "batch")
                       .persistent());
extern "C" __global__ void attention_row_dots(const __grid_constant__ RowDotsParams p,
                                              const __grid_constant__ Workspaces workspaces) {
    __shared__ int drawn;
    const int segments = (p.seqlen_q + p.segment - 1) / p.segment;
    const int blocks = (segments + block_m - 1) / block_m;
    while (true) {
        if (threadIdx.x == 0) drawn = atomicInc(workspaces.next, blocks * p.num_heads * p.batch + gridDim.x - 1);
        __syncthreads();
        const int tile = drawn, head = tile / blocks % p.num_heads, batch = tile / blocks / p.num_heads;
        if (batch >= p.batch) return;
        const int segment = tile % blocks * block_m + threadIdx.x, first = segment * p.segment;
        float sum = 0;
        for (int row = first; row < min(first + p.segment, p.seqlen_q); ++row) {
            const int place = 2 * ((batch * p.num_heads + head) * p.seqlen_q + row);
            sum += workspaces.halves[place] + workspaces.halves[place + 1];
        }
        if (segment < segments) p.dots[(batch * p.num_heads + head) * segments + segment] = sum;
        __syncthreads();
    }
}
