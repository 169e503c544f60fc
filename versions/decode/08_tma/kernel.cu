// Rung 07 whose keys come by TMA: one warp asks for boxes of pages, the others wait for keys, and for nothing else.
//
//     producer     where the boxes of a block are, and one TMA copy a box and panel, as soon as a stage is empty
//     a consumer   its own keys of each block: S = Q K^T, P, O += P V
//     a CTA        adds up what its consumers have, and writes O and lse of its part; `combine` combines parts
#include "config.cuh"
#include "packed_rows.cuh"
#include "page_ring.cuh"
#include "parts_of_sequence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "tile/gemm.cuh"
#include "warp_sums.cuh"

using namespace config;

constexpr int rows = 16;                    // of an mma
constexpr int consumers = num_warps * 32;   // threads; then comes the producer's warp
constexpr int warp_keys = block_n / num_warps;

using QTile = SwizzledPanels<rows, head_dim>;
using KVTile = SwizzledPanels<block_n, head_dim>;
using Sums = WarpSums<num_warps, rows, head_dim>;

struct Shared {
    union {
        PageRing<KVTile, dtype, num_stages> ring;
        Sums sums;  // when all keys are read
    };
    alignas(128) dtype q[QTile::size];
};

FLASHLADDER_KERNEL(attention_decode, CacheParams,
                   Launch{consumers + 32, sizeof(Shared), rows, block_n}
                       .over("cdiv(num_heads * seqlen_q, 16 * num_heads_k)", "num_heads_k * num_parts", "1")
                       .by_tma("k_cache", rows_of_box<block_n>(), 64, 128)
                       .by_tma("v_cache", rows_of_box<block_n>(), 64, 128));

extern "C" __global__ void __launch_bounds__(consumers + 32, ctas_per_sm)
    attention_decode(const __grid_constant__ CacheParams params, const __grid_constant__ Partials partials,
                     const __grid_constant__ KvMaps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    auto &ring = shared.ring;
    launch_dependents();

    const int head_k = blockIdx.y % params.num_heads_k, number = blockIdx.y / params.num_heads_k;
    const Part part = find_part<block_n>(params, number);
    if (part.sequence < 0) return;  // there are fewer parts
    const PackedRows<rows> tile{params, int(blockIdx.x), head_k, part.sequence};
    const int all_keys = params.keys_of(tile.batch), begin = part.first_block(0) * block_n;
    const int keys = min(tile.keys_seen<causal>(all_keys), part.first_block(1) * block_n);

    if (threadIdx.x == 0) {
        ring.init(num_warps);
        fence_mbarrier_init();
    }
    __syncthreads();  // the barriers are made

    if (warp_index() == num_warps) {
        auto find = [&](int first) {
            return KeyPlace::find(params, tile.batch, first + lane_index() * ring.box_rows, keys);
        };
        auto at = ring.producer();
        KeyPlace place = find(begin);  // of the lane's box of the next block
        for (int first = begin; first < keys; first += block_n) {
            const KeyPlace next = find(first + block_n);
            ring.load(at, maps, head_k, place);
            place = next;
        }
        return;
    }

    tile.copy<QTile>(shared.q, params.q, params.q_stride, consumers);
    cp_async_commit();
    int seen[2];  // by the lane's two rows
    for (int h : {0, 1}) seen[h] = tile.keys_seen<causal>(all_keys, h * 8 + accumulator_row());
    cp_async_wait<0>();
    named_barrier_sync(1, consumers);  // Q is there for every consumer

    QOperand<rows, head_dim, 0, HoistedReader<QTile, dtype>, 1> q_operand;
    KOperand<warp_keys, head_dim, 0, HoistedReader<KVTile, dtype, ByRow>> k_operand;
    VOperand<head_dim, warp_keys, 2, HoistedReader<KVTile, dtype>> v_operand;
    q_operand.start(shared.q, 0);

    Accumulator<rows, head_dim> o;
    o.clear();
    DecodeSoftmax softmax{params.softmax_scale * log2_e};

    const int warp_row = warp_index() * warp_keys;  // of a tile
    auto at = ring.consumer();
    for (int first = begin + warp_row; first - warp_row < keys; first += block_n) {
        ring.wait(at);
        if (first < keys) {
            auto &stage = ring.stage[at.stage];
            k_operand.reader.start(stage.k, warp_row);
            v_operand.reader.start(stage.v, warp_row);

            Accumulator<rows, warp_keys> s;
            s.clear();
            gemm<dtype, head_dim>(s, q_operand, k_operand);
            if (first + warp_keys > min(seen[0], seen[1])) softmax.hide(s, first, seen);
            softmax.update(s, o);
            auto p = round_to_operand<dtype>(s);
            if (first + warp_keys > keys) {
                clear_rows_by_warp<KVTile>(stage.v, warp_row + keys - first, warp_row + warp_keys);
                __syncwarp();  // no lane reads what was there
            }
            gemm<dtype, warp_keys>(o, p, v_operand);
            fence_proxy_async();  // this lane has read before TMA writes again
            __syncwarp();         // so has every lane
        }
        ring.release(at);
    }

    named_barrier_sync(1, consumers);  // no warp needs its tiles any more
    shared.sums.put(warp_index(), softmax, o);
    named_barrier_sync(1, consumers);
    shared.sums.merge([&](int i, int col, float4 columns, float lse) {
        if (!tile.has(i)) return;
        const long long at = params.row_index(number, tile.head(i), tile.row(i));
        *reinterpret_cast<float4 *>(partials.o + at * head_dim + col) = columns;
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
