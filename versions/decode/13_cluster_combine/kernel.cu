// A few rows of Q against a cache, whose keys the CTAs of a cluster share out: they combine their parts over its shared memory,
// with no workspace, counter or second kernel. There are no roles: each warp copies the keys that it needs.
//
//     the CTA        copies Q
//     each warp      of its keys of a block: waits for its own copies, num_stages - 1 blocks ahead; S = Q K^T, P, O += P V
//     the CTA        merges what its warps have, in the place of the tiles
//     the cluster    merges what its CTAs have
//
// What is waited for:
//
//     cp.async groups    the keys of a step, one group each, an empty one too
//     __syncwarp         every lane sees the keys; and behind the products, every lane has read them
//     __syncthreads      Q is there for every warp; no warp needs its tiles any more; the CTA's part is complete
//     cluster_sync       all CTAs' parts are there; then: all have been read
#include "cluster_parts.cuh"
#include "config.cuh"
#include "packed_rows.cuh"
#include "pages.cuh"
#include "tile/gemm.cuh"
#include "warp_copy.cuh"

using namespace config;

constexpr int rows = 16;  // of an mma
constexpr int num_threads = num_warps * 32;
constexpr int warp_keys = block_n / num_warps;

using QTile = SwizzledPanels<rows, head_dim>;
using KVTile = SwizzledPanels<warp_keys, head_dim>;
using Sums = WarpSums<num_warps, rows, head_dim>;

constexpr int stage_size = 2 * KVTile::size;  // K and V
constexpr int tiles_bytes = (QTile::size + num_warps * num_stages * stage_size) * sizeof(dtype);

// Behind the loop, in the place of tiles.
struct Ends {
    Sums of_warps;
    PartOfRows<rows, head_dim> of_cta;
};
constexpr int shared_bytes = tiles_bytes > sizeof(Ends) ? tiles_bytes : sizeof(Ends);

static_assert(warp_keys <= 32, "a lane looks up one key");
FLASHLADDER_KERNEL(attention_decode, CacheParams,
                   Launch{num_threads, shared_bytes, rows, block_n}
                       .over("cdiv(num_heads * seqlen_q, 16 * num_heads_k)", "num_heads_k * cluster_size", "batch")
                       .clusters(1, cluster_size));

extern "C" __global__ void __launch_bounds__(num_threads, ctas_per_sm)
    attention_decode(const __grid_constant__ CacheParams params) {
    extern __shared__ __align__(128) char shared[];
    dtype *shared_q = reinterpret_cast<dtype *>(shared);
    dtype *ring = shared_q + QTile::size + warp_index() * num_stages * stage_size;  // the warp's own

    const int head_k = blockIdx.y / cluster_size, split = cluster_rank();
    const PackedRows<rows> tile{params, int(blockIdx.x), head_k, int(blockIdx.z)};
    const int all_keys = params.keys_of(tile.batch), blocks = (all_keys + block_n - 1) / block_n;
    const int begin = blocks * split / cluster_size * block_n;
    const int keys = min(tile.keys_seen<causal>(all_keys), blocks * (split + 1) / cluster_size * block_n);
    int seen[2];  // by the lane's two rows
    for (int h : {0, 1}) seen[h] = tile.keys_seen<causal>(all_keys, h * 8 + accumulator_row());

    const TensorStride at_k = params.k_cache_stride, at_v = params.v_cache_stride;
    const dtype *k = static_cast<const dtype *>(params.k_cache) + tile.head_k * at_k.head;
    const dtype *v = static_cast<const dtype *>(params.v_cache) + tile.head_k * at_v.head;

    tile.copy<QTile>(shared_q, params.q, params.q_stride);
    cp_async_commit();

    // Where the keys of the warp's step `step` begin. Their tile is that of the step num_stages before.
    auto first_key = [&](int step) { return begin + step * block_n + warp_index() * warp_keys; };
    auto tile_of = [&](int step) { return ring + step % num_stages * stage_size; };
    auto find = [&](int step) { return KeyPlace::find(params, tile.batch, first_key(step) + lane_index(), keys); };
    KeyPlace place = find(0);  // of the lane's key in the next copy
    auto load = [&](int step) {
        const int left = keys - first_key(step);
        if (left > 0) {
            copy_rows_by_warp<KVTile>(tile_of(step), left, [&](int r) { return place.row_of(r, k, at_k); });
            copy_rows_by_warp<KVTile>(tile_of(step) + KVTile::size, left, [&](int r) { return place.row_of(r, v, at_v); });
        }
        cp_async_commit();  // a group a step, also an empty one, so that they can be counted
        place = find(step + 1);
    };
    for (int step = 0; step < num_stages - 1; ++step) load(step);
    cp_async_wait<num_stages - 1>();
    __syncthreads();  // Q is there for every warp

    QOperand<rows, head_dim, 0, HoistedReader<QTile, dtype>, 1> q_operand;
    KOperand<warp_keys, head_dim, 0, HoistedReader<KVTile, dtype, ByRow>> k_operand;
    VOperand<head_dim, warp_keys, 2, HoistedReader<KVTile, dtype>> v_operand;
    q_operand.start(shared_q, 0);

    Accumulator<rows, head_dim> o;
    o.clear();
    DecodeSoftmax softmax{params.softmax_scale * log2_e};

    for (int step = 0; first_key(step) < keys; ++step) {
        const int first = first_key(step);
        load(step + num_stages - 1);
        cp_async_wait<num_stages - 1>();
        __syncwarp();  // the keys are there for every lane
        k_operand.reader.start(tile_of(step));
        v_operand.reader.start(tile_of(step) + KVTile::size);

        Accumulator<rows, warp_keys> s;
        s.clear();
        gemm<dtype, head_dim>(s, q_operand, k_operand);
        if (first + warp_keys > min(seen[0], seen[1])) softmax.hide(s, first, seen);
        softmax.update(s, o);
        auto p = round_to_operand<dtype>(s);
        gemm<dtype, warp_keys>(o, p, v_operand);
        __syncwarp();  // every lane has read them
    }

    Ends &ends = *reinterpret_cast<Ends *>(shared);
    __syncthreads();  // no warp needs its tiles any more
    ends.of_warps.put(warp_index(), softmax, o);
    __syncthreads();
    ends.of_warps.merge([&](int i, int col, float4 columns, float lse) {
        *reinterpret_cast<float4 *>(&ends.of_cta.o[i][col]) = columns;
        if (col == 0) ends.of_cta.lse[i] = lse;
    });

    cluster_sync();  // the parts are there
    combine_cluster<cluster_size>(params, tile, ends.of_cta);
    cluster_sync();  // every CTA's part is there until it has been read
}
