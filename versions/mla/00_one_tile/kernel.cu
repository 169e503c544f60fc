// Multi-head latent attention in its plainest form on tensor cores. 16 packed rows of Q go through the cache block by block;
// a block is in shared memory once, and is K in one product and V in the other.
//
// The warps of a CTA have the same rows. For S = Q K^T they share out the keys, for O += P V the columns: O has 512 of
// them, too many for the registers of one warp. So between the two products P goes through shared memory.
#include "config.cuh"
#include "latents.cuh"
#include "tile/gemm.cuh"

using namespace config;

constexpr int rows = 16;  // of an mma
constexpr int num_threads = num_warps * 32;
constexpr int warp_keys = block_n / num_warps;     // of S
constexpr int warp_cols = head_dim_v / num_warps;  // of O

using QTile = SwizzledPanels<rows, head_dim>;
using KVTile = SwizzledPanels<block_n, head_dim>;
using PTile = SwizzledPanels<rows, block_n>;
using Softmax = SharedSoftmax<num_warps, rows>;

constexpr int tiles_size = QTile::size + KVTile::size + PTile::size;
constexpr int shared_bytes = tiles_size * sizeof(dtype) + sizeof(Softmax::Shared);

FLASHLADDER_KERNEL(attention_mla, CacheParams,
                   Launch{num_threads, shared_bytes, rows, block_n}
                       .over("cdiv(num_heads * seqlen_q, 16 * num_heads_k)", "num_heads_k * num_splits", "batch"));

// Two CTAs have room in shared memory. Told so, nvcc takes the registers that there are; else it spills at 128.
extern "C" __global__ void __launch_bounds__(num_threads, 2)
    attention_mla(const __grid_constant__ CacheParams params, const __grid_constant__ Partials partials) {
    extern __shared__ __align__(128) char shared[];
    dtype *shared_q = reinterpret_cast<dtype *>(shared);
    dtype *shared_kv = shared_q + QTile::size;
    dtype *shared_p = shared_kv + KVTile::size;
    const int warp = warp_index();

    const LatentPart<rows, block_n, causal> part{params};
    Softmax softmax{*reinterpret_cast<Softmax::Shared *>(shared_p + PTile::size), warp, 0,
                    params.softmax_scale * log2_e};
    const int seen[2] = {part.seen(softmax.row(0)), part.seen(softmax.row(1))};
    part.tile.copy<QTile>(shared_q, params.q, params.q_stride);

    QOperand<rows, head_dim, 2, HoistedReader<QTile, dtype>> q_operand;
    KOperand<warp_keys, head_dim, 2, HoistedReader<KVTile, dtype, ByRow>> k_operand;
    QOperand<rows, block_n, 2, HoistedReader<PTile, dtype>> p_operand;
    VOperand<warp_cols, block_n, 2, HoistedReader<KVTile, dtype>> v_operand;
    q_operand.start(shared_q, 0);
    k_operand.reader.start(shared_kv, warp * warp_keys);
    p_operand.start(shared_p, 0);
    v_operand.reader.start(shared_kv + KVTile::step(0, warp * warp_cols));

    Accumulator<rows, warp_cols> o;
    o.clear();
    for (int first = part.begin; first < part.end; first += block_n) {
        part.copy<KVTile>(shared_kv, first);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();  // the block is there for every warp, and Q

        const int first_key = first + warp * warp_keys;
        Accumulator<rows, warp_keys> s;
        s.clear();
        gemm<dtype, head_dim>(s, q_operand, k_operand);
        if (first_key + warp_keys > min(seen[0], seen[1])) softmax.hide(s, first_key, seen);
        softmax.offer_maximum(s);
        __syncthreads();  // the maxima of all warps are there
        softmax.update(s, o);
        softmax.store_p<PTile>(shared_p, warp * warp_keys, s);
        __syncthreads();  // P is there for every warp
        gemm<dtype, block_n>(o, p_operand, v_operand);
        __syncthreads();  // no warp needs the block and P any more
    }
    softmax.offer_sum();
    __syncthreads();  // the sums of all warps are there
    softmax.sum_up();
    part.store(partials, softmax, o, warp * warp_cols, head_dim_v);
}

FLASHLADDER_KERNEL(combine, SplitParams, Launch{32}.over("seqlen_q", "num_heads", "batch"));

extern "C" __global__ void __launch_bounds__(32)
    combine(const __grid_constant__ SplitParams params, const __grid_constant__ Partials partials) {
    combine_parts<head_dim_v>(params, partials, params.parts_of(blockIdx.z), blockIdx.z, blockIdx.y, blockIdx.x, 0,
                              lse_of_no_key);
}
