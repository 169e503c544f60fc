// A warp combines 64 columns of a row. The warps of all CTAs share out what there is of sequences that are cut, as many
// CTAs as run at once: where no sequence is cut, they are gone soon.
#pragma once
#include "decode/cuda/parts_of_sequence.cuh"
#include "latents.cuh"
#include "ptx/griddepcontrol.cuh"

constexpr int combine_warps = 4, combine_ctas = 8;  // of an SM
constexpr int slice = 64, slices = config::head_dim_v / slice;
FLASHLADDER_KERNEL(combine, SplitParams,
                   Launch{combine_warps * 32}.over("min(2 * batch * seqlen_q * num_heads, 8 * 132)", "1", "1").dependent());

extern "C" __global__ void __launch_bounds__(combine_warps * 32, combine_ctas)
    combine(const __grid_constant__ SplitParams params, const __grid_constant__ Partials partials) {
    const int rows_of_one = params.seqlen_q * params.num_heads;
    int item = blockIdx.x * combine_warps + uniform_warp_index();  // of a sequence's; behind its last one come the next one's
    each_cut_sequence<config::block_n, one_wave>(params, [&](int sequence, Parts parts) {
        wait_for_dependency();  // the parts are there
        for (; item < rows_of_one * slices; item += gridDim.x * combine_warps) {
            const int row = item / slices;
            combine_parts<config::head_dim_v, slice>(params, partials, parts, sequence, row % params.num_heads,
                                                     row / params.num_heads, item % slices * slice, lse_of_no_key);
        }
        item -= rows_of_one * slices;
    });
    wait_for_dependency();  // when this kernel has ended, so has the other one
}
