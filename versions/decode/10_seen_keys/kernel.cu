// Rung 06 for rows that do not see all keys, or see them otherwise: padding in front of a sequence, a sliding window, a
// softcap, ALiBi. A sequence begins with the first key that any of its rows sees. Keys are counted from there, so that
// parts are cut from these keys alone, and no other is read.
#include "config.cuh"
#include "packed_rows.cuh"
#include "pages.cuh"
#include "equal_parts.cuh"
#include "last_cta.cuh"
#include "skipped_keys.cuh"
#include "tile/gemm.cuh"
#include "warp_copy.cuh"
#include "warp_sums.cuh"

using namespace config;

constexpr int rows = 16;  // of an mma
constexpr int num_threads = num_warps * 32;
constexpr int warp_keys = block_n / num_warps;

using QTile = SwizzledPanels<rows, head_dim>;
using KVTile = SwizzledPanels<warp_keys, head_dim>;
using Sums = WarpSums<num_warps, rows, head_dim>;

constexpr int stage_size = 2 * KVTile::size;  // K and V
constexpr int tiles_bytes = (QTile::size + num_warps * num_stages * stage_size) * sizeof(dtype);
constexpr int shared_bytes = tiles_bytes > sizeof(Sums) ? tiles_bytes : sizeof(Sums);

static_assert(warp_keys <= 32, "a lane looks up one key");
FLASHLADDER_KERNEL(attention_decode, SeenParams,
                   Launch{num_threads, shared_bytes, rows, block_n}
                       .over("cdiv(num_heads * seqlen_q, 16 * num_heads_k)", "num_heads_k * num_parts", "1"));

extern "C" __global__ void __launch_bounds__(num_threads, ctas_per_sm)
    attention_decode(const __grid_constant__ SeenParams params, const __grid_constant__ Work work) {
    extern __shared__ __align__(128) char shared[];
    dtype *shared_q = reinterpret_cast<dtype *>(shared);
    dtype *ring = shared_q + QTile::size + warp_index() * num_stages * stage_size;  // the warp's own

    const int head_k = blockIdx.y % params.num_heads_k, number = blockIdx.y / params.num_heads_k;
    const Part part = find_part<block_n>(params, number);
    if (part.sequence < 0) return;  // there are fewer parts
    const PackedRows<rows> tile{params, int(blockIdx.x), head_k, part.sequence};
    const int sequence_begin = params.first_key(tile.batch);
    const SeenKeys seen{params, tile};
    const int begin = max(part.first_block(0), seen.first(0) / block_n) * block_n;
    const int keys = min(seen.end(tile.last()), part.first_block(1) * block_n);

    const TensorStride at_k = params.k_cache_stride, at_v = params.v_cache_stride;
    const dtype *k = static_cast<const dtype *>(params.k_cache) + tile.head_k * at_k.head;
    const dtype *v = static_cast<const dtype *>(params.v_cache) + tile.head_k * at_v.head;

    tile.copy<QTile>(shared_q, params.q, params.q_stride);
    cp_async_commit();

    // Where the keys of the warp's step `step` begin. Their tile is that of the step num_stages before.
    auto first_key = [&](int step) { return begin + step * block_n + warp_index() * warp_keys; };
    auto tile_of = [&](int step) { return ring + step % num_stages * stage_size; };
    auto find = [&](int step) {
        const int key = sequence_begin + first_key(step) + lane_index();
        return KeyPlace::find(params, tile.batch, key, sequence_begin + keys);
    };
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
    const Softcap<softcap> score{params};
    const LaneBias bias{seen, score.scale};
    const LaneSees sees{seen};
    DecodeSoftmax softmax{score.scale};

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
        score.apply(s);
        bias.add(s, first);
        sees.hide(s, first);
        softmax.update(s, o);
        auto p = round_to_operand<dtype>(s);
        gemm<dtype, warp_keys>(o, p, v_operand);
        __syncwarp();  // every lane has read them
    }

    Sums &sums = *reinterpret_cast<Sums *>(shared);
    __syncthreads();  // no warp needs its tiles any more
    sums.put(warp_index(), softmax, o);
    __syncthreads();
    sums.merge([&](int i, int col, float4 columns, float lse) {
        if (!tile.has(i)) return;
        const long long at = params.row_index(number, tile.head(i), tile.row(i));
        *reinterpret_cast<float4 *>(work.partials.o + at * head_dim + col) = columns;
        if (col == 0) work.partials.lse[at] = lse;
    });

    if (!is_last_of(part.count, work.arrived + rows_index(tile.batch, head_k, params.num_heads_k))) return;
    for (int i = warp_index(); i < rows && tile.has(i); i += num_warps)
        combine_parts(params, work.partials, part.all(), tile.batch, tile.head(i), tile.row(i));
}
