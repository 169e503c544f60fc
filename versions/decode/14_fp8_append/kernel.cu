// Rung 12 for caches in 8-bit floats, e4m3: new keys are rounded on their way to the cache, and all that rows see, and how,
// is as there. The products are those of rung 11. Scales are of a head, of the whole cache, or of a page.
#include "config.cuh"
#include "packed_rows.cuh"
#include "pages.cuh"
#include "equal_parts.cuh"
#include "fp8_operands.cuh"
#include "fp8_scales.cuh"
#include "last_cta.cuh"
#include "new_keys.cuh"
#include "seen_keys.cuh"
#include "tile/gemm.cuh"
#include "warp_copy.cuh"
#include "warp_sums.cuh"

using namespace config;

constexpr int rows = 16;  // of an mma
constexpr int num_threads = num_warps * 32;
constexpr int warp_keys = block_n / num_warps;

using QTile = SwizzledPanels<rows, head_dim>;
using KVTile = SwizzledPanels<warp_keys, head_dim / 2>;  // of pairs of columns
using Sums = WarpSums<num_warps, rows, head_dim>;
using Scales = WarpScales<warp_keys>;
using Fp8Params = Scaled<AppendParams>;

constexpr int stage_size = 2 * KVTile::size;  // K and V
constexpr int q_bytes = QTile::size * sizeof(dtype);
constexpr int tiles_bytes = q_bytes + num_warps * num_stages * (stage_size * sizeof(uint16_t) + Scales::stage_size * 4);
constexpr int shared_bytes = tiles_bytes > sizeof(Sums) ? tiles_bytes : sizeof(Sums);

// A CTA for each new key; without new keys the host leaves the kernel out.
FLASHLADDER_KERNEL(append, Fp8Params, Launch{num_threads}.over("seqlen_new", "batch", "1"));

extern "C" __global__ void __launch_bounds__(num_threads)
    append(const __grid_constant__ Fp8Params params, const __grid_constant__ Work) {
    if constexpr (new_keys) append_key<dtype, Quantised>(params, blockIdx.y, blockIdx.x);
}

static_assert(warp_keys <= 32, "a lane looks up one key");
FLASHLADDER_KERNEL(attention_decode, Fp8Params,
                   Launch{num_threads, shared_bytes, rows, block_n}
                       .over("cdiv(num_heads * seqlen_q, 16 * num_heads_k)", "num_heads_k * num_parts", "1"));

extern "C" __global__ void __launch_bounds__(num_threads, ctas_per_sm)
    attention_decode(const __grid_constant__ Fp8Params params, const __grid_constant__ Work work) {
    extern __shared__ __align__(128) char shared[];
    dtype *shared_q = reinterpret_cast<dtype *>(shared);
    uint16_t *rings = reinterpret_cast<uint16_t *>(shared_q + QTile::size);
    uint16_t *ring = rings + warp_index() * num_stages * stage_size;  // the warp's own
    float *scales_of_keys = reinterpret_cast<float *>(rings + num_warps * num_stages * stage_size);

    const int head_k = blockIdx.y % params.num_heads_k, number = blockIdx.y / params.num_heads_k;
    const Part part = find_part<block_n>(params, number);
    if (part.sequence < 0) return;  // there are fewer parts
    const PackedRows<rows> tile{params, int(blockIdx.x), head_k, part.sequence};
    const int sequence_begin = params.first_key(tile.batch);
    const SeenKeys seen{params, tile};
    const int begin = max(part.first_block(0), seen.first(0) / block_n) * block_n;
    const int keys = min(seen.end(tile.last()), part.first_block(1) * block_n);

    const TensorStride at_k = params.k_cache_stride, at_v = params.v_cache_stride;
    const uint8_t *k = static_cast<const uint8_t *>(params.k_cache) + tile.head_k * at_k.head;
    const uint8_t *v = static_cast<const uint8_t *>(params.v_cache) + tile.head_k * at_v.head;
    Scales scales{params, tile.batch, tile.head_k, scales_of_keys + warp_index() * num_stages * Scales::stage_size};

    tile.copy<QTile>(shared_q, params.q, params.q_stride);
    cp_async_commit();

    // Where the keys of the warp's step `step` begin. Their tile is that of the step num_stages before.
    auto first_key = [&](int step) { return begin + step * block_n + warp_index() * warp_keys; };
    auto tile_of = [&](int step) { return ring + step % num_stages * stage_size; };
    const uint8_t *k_row, *v_row;  // of the lane's key in the next copy
    int page;
    auto find = [&](int step) {
        const int key = sequence_begin + first_key(step) + lane_index();
        const KeyPlace place = KeyPlace::find(params, tile.batch, key, sequence_begin + keys);
        k_row = k + place.page * at_k.batch + place.row * at_k.row;
        v_row = v + place.page * at_v.batch + place.row * at_v.row;
        page = place.page;
    };
    find(0);
    auto load = [&](int step) {
        const int left = keys - first_key(step);
        if (left > 0) {
            copy_rows_by_warp<KVTile>(tile_of(step), left, [&](int r) { return pairs_of_lane(k_row, r); });
            copy_rows_by_warp<KVTile>(tile_of(step) + KVTile::size, left, [&](int r) { return pairs_of_lane(v_row, r); });
            scales.copy(step % num_stages, page, lane_index() < left);
        }
        cp_async_commit();  // a group a step, also an empty one, so that they can be counted
        find(step + 1);
    };
    for (int step = 0; step < num_stages - 1; ++step) load(step);
    cp_async_wait<num_stages - 1>();
    __syncthreads();  // Q is there for every warp
    turn_q<QTile>(shared_q, tile, params);

    Fp8QOperand<head_dim> q_operand;
    Fp8KOperand<warp_keys, head_dim, KVTile> k_operand;
    Fp8VOperand<head_dim, warp_keys, KVTile> v_operand;
    q_operand.start<QTile>(shared_q);

    Accumulator<rows, head_dim> o;
    o.clear();
    const Softcap<softcap> score{params};
    const LaneBias bias{seen, score.scale};
    const LaneSees sees{seen};
    Fp8Softmax softmax{score.scale};

    for (int step = 0; first_key(step) < keys; ++step) {
        const int first = first_key(step);
        load(step + num_stages - 1);
        cp_async_wait<num_stages - 1>();
        __syncwarp();  // the keys are there for every lane
        k_operand.start(tile_of(step));
        v_operand.start(tile_of(step) + KVTile::size);

        Accumulator<rows, warp_keys> s;
        s.clear();
        gemm<__half, head_dim>(s, q_operand, k_operand);
        each_row([&](int h) { scale_row(s, h, q_operand.unit[h] * scales.k_unit); });
        scales.scale_scores(step % num_stages, s);
        score.apply(s);
        bias.add(s, first);
        sees.hide(s, first);
        softmax.update(s, o);
        scales.scale_weights(step % num_stages, s, o);
        auto p = round_to_operand<__half>(s);
        gemm<__half, warp_keys>(o, p, v_operand);
        __syncwarp();  // every lane has read them
    }

    Sums &sums = *reinterpret_cast<Sums *>(shared);
    __syncthreads();  // no warp needs its tiles any more
    scales.scale_sum(o);
    sums.put(warp_index(), softmax, [&](int h, float *row) { put_columns(o, h, row); });
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
