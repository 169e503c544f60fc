// Multi-head latent attention in its plainest form on tensor cores. 16 packed rows of Q go through the cache block by block;
// a block is in shared memory once, and is K in one product and V in the other.
//
// The warps of a CTA have the same rows. For S = Q K^T they share out the keys, for O += P V the columns: O has 512 of
// them, too many for the registers of one warp. So between the two products P goes through shared memory.
#include "config.cuh"
#include "decode/cuda/packed_rows.cuh"
#include "decode/cuda/pages.cuh"
#include "shared_softmax.cuh"
#include "tile/gemm.cuh"

using namespace config;

constexpr int rows = 16;  // of an mma
constexpr int num_threads = num_warps * 32;
constexpr int warp_keys = block_n / num_warps;     // of S
constexpr int warp_cols = head_dim_v / num_warps;  // of O
constexpr int chunk = 8;                           // elements of 16 bytes

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
    Softmax softmax{*reinterpret_cast<Softmax::Shared *>(shared_p + PTile::size), params.softmax_scale * log2_e};

    const int head_k = blockIdx.y % params.num_heads_k, split = blockIdx.y / params.num_heads_k;
    const PackedRows<rows> tile{params, int(blockIdx.x), head_k, int(blockIdx.z)};
    const int all_keys = params.keys_of(tile.batch), blocks = (all_keys + block_n - 1) / block_n;
    const int begin = params.first_block(blocks, split) * block_n;
    const int keys = min(tile.keys_seen<causal>(all_keys), params.first_block(blocks, split + 1) * block_n);
    int seen[2];  // by the lane's two rows
    for (int h : {0, 1}) seen[h] = tile.keys_seen<causal>(all_keys, h * 8 + accumulator_row());

    const TensorStride at = params.k_cache_stride;
    const dtype *cache = static_cast<const dtype *>(params.k_cache) + tile.head_k * at.head;
    tile.copy<QTile>(shared_q, params.q, params.q_stride);
    auto load = [&](int first) {
        for (int i = threadIdx.x * chunk; i < block_n * head_dim; i += num_threads * chunk) {
            const int r = i / head_dim, col = i % head_dim;
            const KeyPlace place = KeyPlace::find(params, tile.batch, first + r, keys);
            // Zeros behind the last key: P is 0 there, and 0 * V must be 0.
            cp_async_16_or_zeros(shared_address(shared_kv + KVTile::offset(r, col)),
                                 cache + place.page * at.batch + place.row * at.row + col, first + r < keys);
        }
        cp_async_commit();
    };

    QOperand<rows, head_dim, 2, HoistedReader<QTile, dtype>> q_operand;
    KOperand<warp_keys, head_dim, 2, HoistedReader<KVTile, dtype, ByRow>> k_operand;
    QOperand<rows, block_n, 2, HoistedReader<PTile, dtype>> p_operand;
    VOperand<warp_cols, block_n, 2, HoistedReader<KVTile, dtype>> v_operand;
    q_operand.start(shared_q, 0);
    k_operand.reader.start(shared_kv, warp_index() * warp_keys);
    p_operand.start(shared_p, 0);
    v_operand.reader.start(shared_kv + KVTile::step(0, warp_index() * warp_cols));

    Accumulator<rows, warp_cols> o;
    o.clear();
    for (int first = begin; first < keys; first += block_n) {
        load(first);
        cp_async_wait<0>();
        __syncthreads();  // the block is there for every warp, and Q

        const int first_key = first + warp_index() * warp_keys;
        Accumulator<rows, warp_keys> s;
        s.clear();
        gemm<dtype, head_dim>(s, q_operand, k_operand);
        if (first_key + warp_keys > min(seen[0], seen[1])) softmax.hide(s, first_key, seen);
        softmax.offer_maximum(s);
        __syncthreads();  // the maxima of all warps are there, and no warp reads the P before any more
        softmax.update(s, o);
        softmax.store_p<PTile, dtype>(shared_p, warp_index() * warp_keys, s);
        __syncthreads();  // P is there for every warp
        gemm<dtype, block_n>(o, p_operand, v_operand);
        __syncthreads();  // no warp needs the block any more
    }

    softmax.sum_up();
    softmax.finish([&](int h, float sum, float lse) {
        const int i = h * 8 + accumulator_row();
        if (!tile.has(i)) return;
        const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
        const long long at = params.row_index(split * params.batch + tile.batch, tile.head(i), tile.row(i));
        float *to = partials.o + at * head_dim_v + warp_index() * warp_cols + accumulator_col();
#pragma unroll
        for (int n = 0; n < warp_cols / 8; ++n)
            *reinterpret_cast<float2 *>(to + n * 8) =
                make_float2(o.block[0][n][2 * h] * inverse, o.block[0][n][2 * h + 1] * inverse);
        if (threadIdx.x < 32 && lane_index() % 4 == 0) partials.lse[at] = lse;
    });
}

FLASHLADDER_KERNEL(combine, SplitParams, Launch{32}.over("seqlen_q", "num_heads", "batch"));

extern "C" __global__ void __launch_bounds__(32)
    combine(const __grid_constant__ SplitParams params, const __grid_constant__ Partials partials) {
    combine_parts<head_dim_v>(params, partials, params.parts_of(blockIdx.z), blockIdx.z, blockIdx.y, blockIdx.x);
}
