// Rung 07 for caches in 8-bit floats, e4m3, with a scale for K and one for V of each head: half the bytes are read. Q and P
// are f16 in the products, as which every e4m3 is exact. The scale of K goes into the softmax's, that of V into O.
#include "config.cuh"
#include "packed_rows.cuh"
#include "pages.cuh"
#include "equal_parts.cuh"
#include "fp8_operands.cuh"
#include "parts_of_sequence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "scaled_cache.cuh"
#include "warp_copy.cuh"
#include "warp_sums.cuh"

using namespace config;

constexpr int rows = 16;  // of an mma
constexpr int num_threads = num_warps * 32;
constexpr int warp_keys = block_n / num_warps;

using QTile = SwizzledPanels<rows, head_dim>;
using KVTile = SwizzledPanels<warp_keys, head_dim / 2>;  // of pairs of columns
using Sums = WarpSums<num_warps, rows, head_dim>;

constexpr int stage_size = 2 * KVTile::size;  // K and V
constexpr int tiles_bytes = QTile::size * sizeof(dtype) + num_warps * num_stages * stage_size * sizeof(uint16_t);
constexpr int shared_bytes = tiles_bytes > sizeof(Sums) ? tiles_bytes : sizeof(Sums);

static_assert(warp_keys <= 32, "a lane looks up one key");

using Fp8Params = Scaled<CacheParams>;
FLASHLADDER_KERNEL(attention_decode, Fp8Params,
                   Launch{num_threads, shared_bytes, rows, block_n}
                       .over("cdiv(num_heads * seqlen_q, 16 * num_heads_k)", "num_heads_k * num_parts", "1"));

extern "C" __global__ void __launch_bounds__(num_threads, ctas_per_sm)
    attention_decode(const __grid_constant__ Fp8Params params, const __grid_constant__ Partials partials) {
    extern __shared__ __align__(128) char shared[];
    dtype *shared_q = reinterpret_cast<dtype *>(shared);
    launch_dependents();
    uint16_t *ring = reinterpret_cast<uint16_t *>(shared_q + QTile::size) + warp_index() * num_stages * stage_size;

    const int head_k = blockIdx.y % params.num_heads_k, number = blockIdx.y / params.num_heads_k;
    const Part part = find_part<block_n>(params, number);
    if (part.sequence < 0) return;  // there are fewer parts
    const PackedRows<rows> tile{params, int(blockIdx.x), head_k, part.sequence};
    const int all_keys = params.keys_of(tile.batch), begin = part.first_block(0) * block_n;
    const int keys = min(tile.keys_seen<causal>(all_keys), part.first_block(1) * block_n);
    int seen[2];  // by the lane's two rows
    for (int h : {0, 1}) seen[h] = tile.keys_seen<causal>(all_keys, h * 8 + accumulator_row());

    const TensorStride at_k = params.k_cache_stride, at_v = params.v_cache_stride;
    const uint8_t *k = static_cast<const uint8_t *>(params.k_cache) + tile.head_k * at_k.head;
    const uint8_t *v = static_cast<const uint8_t *>(params.v_cache) + tile.head_k * at_v.head;
    const int scale_at = params.scale_at(tile.batch, 0, tile.head_k);
    const float k_scale = params.k_descale[scale_at], v_scale = params.v_descale[scale_at];

    tile.copy<QTile>(shared_q, params.q, params.q_stride);
    cp_async_commit();

    // Where the keys of the warp's step `step` begin. Their tile is that of the step num_stages before.
    auto first_key = [&](int step) { return begin + step * block_n + warp_index() * warp_keys; };
    auto tile_of = [&](int step) { return ring + step % num_stages * stage_size; };
    const uint8_t *k_row, *v_row;  // of the lane's key in the next copy
    auto find = [&](int step) {
        const KeyPlace place = KeyPlace::find(params, tile.batch, first_key(step) + lane_index(), keys);
        k_row = k + place.page * at_k.batch + place.row * at_k.row;
        v_row = v + place.page * at_v.batch + place.row * at_v.row;
    };
    find(0);
    auto load = [&](int step) {
        const int left = keys - first_key(step);
        if (left > 0) {
            copy_rows_by_warp<KVTile>(tile_of(step), left, [&](int r) { return pairs_of_lane(k_row, r); });
            copy_rows_by_warp<KVTile>(tile_of(step) + KVTile::size, left, [&](int r) { return pairs_of_lane(v_row, r); });
        }
        cp_async_commit();  // a group a step, also an empty one, so that they can be counted
        find(step + 1);
    };
    for (int step = 0; step < num_stages - 1; ++step) load(step);
    cp_async_wait<num_stages - 1>();
    __syncthreads();  // Q is there for every warp

    Fp8QOperand<head_dim> q_operand;
    Fp8KOperand<warp_keys, head_dim, KVTile> k_operand;
    Fp8VOperand<head_dim, warp_keys, KVTile> v_operand;
    q_operand.start<QTile>(shared_q);

    Accumulator<rows, head_dim> o;
    o.clear();
    Fp8Softmax softmax{params.softmax_scale * k_scale * log2_e};

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
        each_row([&](int h) { scale_row(s, h, q_operand.unit[h]); });
        if (first + warp_keys > min(seen[0], seen[1])) softmax.hide(s, first, seen);
        softmax.update(s, o);
        auto p = round_to_operand<__half>(s);
        gemm<__half, warp_keys>(o, p, v_operand);
        __syncwarp();  // every lane has read them
    }

    Sums &sums = *reinterpret_cast<Sums *>(shared);
    __syncthreads();  // no warp needs its tiles any more
    sums.put(warp_index(), softmax, [&](int h, float *row) { put_columns(o, h, row); });
    __syncthreads();
    sums.merge([&](int i, int col, float4 columns, float lse) {
        if (!tile.has(i)) return;
        const long long at = params.row_index(number, tile.head(i), tile.row(i));
        *reinterpret_cast<float4 *>(partials.o + at * head_dim + col) =
            make_float4(columns.x * v_scale, columns.y * v_scale, columns.z * v_scale, columns.w * v_scale);
        if (col == 0) partials.lse[at] = lse;
    });
}

FLASHLADDER_KERNEL(combine, SplitParams, Launch{32}.over("seqlen_q", "num_heads", "batch").dependent());

extern "C" __global__ void __launch_bounds__(32)
    combine(const __grid_constant__ SplitParams params, const __grid_constant__ Partials partials) {
    const Parts parts = parts_of_sequence<block_n>(params, blockIdx.z);
    wait_for_dependency();  // the parts are there
    combine_parts(params, partials, parts, blockIdx.z, blockIdx.y, blockIdx.x);
}
