#include "row_dots.cuh"
using namespace config;

FLASHLADDER_KERNEL(attention_row_dots, RowDotsParams, Launch{block_m, 0, block_m});
extern "C" __global__ void attention_row_dots(const __grid_constant__ RowDotsParams p) {
    const int row = blockIdx.x * block_m + threadIdx.x;
    if (row < p.seqlen_q)
        p.dots[(blockIdx.z * p.num_heads + blockIdx.y) * p.seqlen_q + row] =
            dot(p, blockIdx.z, blockIdx.y, row, 0, head_dim_v);
}
