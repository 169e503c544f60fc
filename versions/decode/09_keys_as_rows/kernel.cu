// Rung 08 with keys as the rows of wgmma, and rows of Q as its columns: S^T = K Q^T, O^T += V^T P^T.
//
//     producer     boxes of K and V, as in rung 08
//     warpgroup    S^T of a block, the maxima of its columns, P^T by way of shared memory, O^T += V^T P^T
//     a CTA        writes O and lse of its part; `combine` combines parts
#include "config.cuh"
#include "column_softmax.cuh"
#include "packed_rows.cuh"
#include "page_ring.cuh"
#include "parts_of_sequence.cuh"
#include "ptx/griddepcontrol.cuh"

using namespace config;

constexpr int consumers = warpgroup_threads;  // then comes the producer's warp

using QTile = SwizzledPanels<block_m, head_dim>;
using KVTile = SwizzledPanels<block_n, head_dim>;
using PTile = SwizzledPanels<block_m, block_n>;
constexpr int panels = KVTile::panels;  // of O^T; some columns of the last one may be zeros

struct Shared {
    PageRing<KVTile, dtype, num_stages> ring;
    alignas(1024) dtype q[QTile::size];
    alignas(1024) dtype p[PTile::size];
    ColumnExchange<block_m> of_warps;
};

FLASHLADDER_KERNEL(attention_decode, CacheParams,
                   Launch{consumers + 32, sizeof(Shared), block_m, block_n}
                       .over("cdiv(num_heads*seqlen_q, block_m*num_heads_k)", "num_heads_k * num_parts", "1")
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
    const PackedRows<block_m> tile{params, int(blockIdx.x), head_k, part.sequence};
    const int all_keys = params.keys_of(tile.batch), begin = part.first_block(0) * block_n;
    const int keys = min(tile.keys_seen<causal>(all_keys), part.first_block(1) * block_n);

    if (threadIdx.x == 0) {
        ring.init(4);
        fence_mbarrier_init();
    }
    __syncthreads();  // the barriers are made

    if (warp_index() == consumers / 32) {
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
    ColumnSoftmax<block_m> softmax{params.softmax_scale * log2_e};
    softmax.each_column([&](int n, int c) { softmax.seen[n][c] = tile.keys_seen<causal>(all_keys, softmax.column(n, c)); });
    cp_async_wait<0>();
    fence_proxy_async();  // before wgmma reads Q
    named_barrier_sync(1, consumers);

    ByRows<QTile> q;
    ByRows<PTile> p;
    q.start(shared.q);
    p.start(shared.p);

    Accumulator<16, block_m> o[panels];  // a warp has 16 columns of each panel of O
#pragma unroll
    for (auto &panel : o) panel.clear();

    auto at = ring.consumer();
    for (int first = begin; first < keys; first += block_n) {
        auto &stage = ring.stage[at.stage];
        ring.wait(at);

        // S^T = K Q^T, 64 keys at a time
        Accumulator<16, block_m> s[block_n / 64];
#pragma unroll
        for (int i = 0; i < block_n / 64; ++i) {
            ByRows<KVTile> k;
            k.start(stage.k, i * 64);
            start_product<dtype, head_dim>(s[i], k, q);
        }
#pragma unroll
        for (auto &of_64 : s) wait_for(of_64);

        // P^T; O^T and l follow the new maxima. No warp reads the P before: each has come here behind its last product.
        const int left = keys - first;
        if (first + block_n > softmax.fewest_seen()) softmax.hide(s, first);
        softmax.update(s, o, shared.of_warps);
        store_transposed<PTile>(shared.p, s);
        if (left < block_n) {
            const int warp_row = warp_index() * block_n / 4;
            clear_rows_by_warp<KVTile>(stage.v, max(left, warp_row), warp_row + block_n / 4);
        }
        fence_proxy_async();  // before wgmma reads P, and zeros in V
        named_barrier_sync(1, consumers);

        // O^T += V^T P^T
#pragma unroll
        for (int i = 0; i < panels; ++i) {
            ByColumns<KVTile> v;
            v.start(stage.v + KVTile::step(0, i * 64));
            start_product<dtype, block_n>(o[i], v, p, true);
        }
#pragma unroll
        for (auto &panel : o) wait_for(panel);
        ring.release(at);
    }

    softmax.sum_up(shared.of_warps);
    softmax.each_column([&](int n, int c) {
        const int i = softmax.column(n, c);
        if (!tile.has(i)) return;
        const float l = softmax.l[n][c], inverse = l > 0.0f ? 1.0f / l : 0.0f;
        const long long at = params.row_index(number, tile.head(i), tile.row(i));
        float *to = partials.o + at * head_dim;
#pragma unroll
        for (int panel = 0; panel < panels; ++panel)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int col = panel * 64 + warp_index() * 16 + h * 8 + accumulator_row();
                if (head_dim % 64 == 0 || col < head_dim) to[col] = o[panel].block[0][n][2 * h + c] * inverse;
            }
        if (warp_index() == 0 && accumulator_row() == 0) partials.lse[at] = (softmax.m[n][c] + __log2f(l)) * ln_2;
    });
}

FLASHLADDER_KERNEL(combine, SplitParams, Launch{32}.over("seqlen_q", "num_heads", "batch").dependent());

extern "C" __global__ void __launch_bounds__(32)
    combine(const __grid_constant__ SplitParams params, const __grid_constant__ Partials partials) {
    const Parts parts = parts_of_sequence<block_n>(params, blockIdx.z);
    wait_for_dependency();  // the parts are there
    combine_parts(params, partials, parts, blockIdx.z, blockIdx.y, blockIdx.x);
}
