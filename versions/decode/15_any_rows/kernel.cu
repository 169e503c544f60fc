// Rung 10 for any number of rows: prompts, chunks, drafts and single tokens, which lie one behind the other. A CTA has a
// tile of packed rows of one sequence, which it finds on the GPU. Its warps have rows of their own, 16 each, and share a
// ring of blocks of keys, of which each warp looks up and copies a part.
#include "config.cuh"
#include "row_parts.cuh"
#include "row_products.cuh"
#include "epilogue/store.cuh"
#include "warp_copy.cuh"

using namespace config;

constexpr int rows = 16;  // of a warp
constexpr int num_warps = block_m / rows, num_threads = num_warps * 32;
constexpr int warp_keys = block_n / num_warps;  // that it copies

using QTile = SwizzledPanels<block_m, head_dim>;
using Products = RowProducts<QTile, block_n, warp_keys>;
using Element = Products::Element;
using KVTile = Products::Tile;

constexpr int stage_size = 2 * KVTile::size;  // K and V
constexpr int stage_bytes = stage_size * sizeof(Element) + Products::scales_bytes;
constexpr int shared_bytes = QTile::size * sizeof(dtype) + num_stages * stage_bytes;
FLASHLADDER_KERNEL(attention_decode, RowParams, Launch{num_threads, shared_bytes, block_m, block_n}.over(FLASHLADDER_ROW_TILES));

extern "C" __global__ void __launch_bounds__(num_threads, ctas_per_sm)
    attention_decode(const __grid_constant__ RowParams params, const __grid_constant__ RowParts parts) {
    extern __shared__ __align__(128) char shared[];
    dtype *shared_q = reinterpret_cast<dtype *>(shared);
    Element *ring = reinterpret_cast<Element *>(shared_q + QTile::size);

    const int warp = uniform_warp_index();
    const int head_k = blockIdx.y;
    const RowWork work = RowSchedule<block_m, block_n, RowParams>{params}.find(blockIdx.x);
    const TilePlace &at = work.at;
    const RowTile<block_m> tile{params, at, head_k};
    if (!tile.has(0)) return;  // a number of no tile
    const RowTile<rows> own{params, at, head_k, warp, num_warps};
    const SeenKeys seen{params, tile, at.keys};
    const SeenKeys own_seen{params, own, at.keys};
    const int first_seen = seen.first(0), first_block = first_seen / block_n;
    const int all = seen.end(tile.last()), blocks_end = (all + block_n - 1) / block_n;
    const int begin = work.first_block(first_block, blocks_end) * block_n;
    const int end = min(all, work.first_block(first_block, blocks_end, 1) * block_n);
    const int own_begin = own_seen.first(0), own_end = own.has(0) ? own_seen.end(own.last()) : 0;

    const TensorStride at_k = params.k_cache_stride, at_v = params.v_cache_stride;
    using Cached = Products::Cached;
    const Cached *k = static_cast<const Cached *>(params.k_cache) + head_k * at_k.head;
    const Cached *v = static_cast<const Cached *>(params.v_cache) + head_k * at_v.head;
    const auto columns = columns_of<narrower>(params), columns_v = columns_of_v<narrower>(params);
    Products products{params, tile.batch, head_k, reinterpret_cast<char *>(ring + num_stages * stage_size)};

    const int warp_row = warp * rows;
    copy_part_by_warp<QTile, rows>(
        shared_q, warp_row, [&](int r) { return own.template element<const dtype>(params.q, params.q_stride, r); },
        [&](int r, int col) { return own.has(r) && columns.has(col); });
    cp_async_commit();

    // Where the keys of a step begin. Their tiles are those of the step num_stages before.
    const int first_copied = warp * warp_keys;
    auto first_key = [&](int step) { return begin + step * block_n; };
    auto tiles_of = [&](int step) { return ring + step % num_stages * stage_size; };
    auto find = [&](int step) {
        const int key = first_key(step) + first_copied + lane_index();
        return key < first_seen ? KeyPlace{0, 0} : KeyPlace::find(params, tile.batch, key, end);
    };
    KeyPlace place = find(0);  // of the lane's key in the next copy
    auto load = [&](int step) {
        const int first = first_key(step) + first_copied;
        // What is before a window may be anything, and 0 * V must be 0.
        auto is_seen = [&](int r) { return first + r >= first_seen && first + r < end; };
        constexpr int each = sizeof(Element) / sizeof(Cached);  // columns of an element
        auto in_elements = [](const Cached *row) { return reinterpret_cast<const Element *>(row); };
        if (first_key(step) < end) {
            Element *to = tiles_of(step);
            copy_part_by_warp<KVTile, warp_keys>(
                to, first_copied, [&](int r) { return in_elements(place.row_of(r, k, at_k)); },
                [&](int r, int col) { return is_seen(r) && columns.has(col * each); });
            copy_part_by_warp<KVTile, warp_keys>(
                to + KVTile::size, first_copied, [&](int r) { return in_elements(place.row_of(r, v, at_v)); },
                [&](int r, int col) { return is_seen(r) && columns_v.has(col * each); });
            products.copy_scales(step % num_stages, first_copied, place.page, is_seen(lane_index()));
        }
        cp_async_commit();  // a group a step, also an empty one, so that they can be counted
        place = find(step + 1);
    };
    for (int step = 0; step < num_stages - 1; ++step) load(step);
    cp_async_wait<num_stages - 1>();
    __syncwarp();  // the warp's rows of Q are there

    products.take_rows(shared_q, warp_row);

    Accumulator<rows, head_dim> o;
    o.clear();
    const Softcap<softcap> score{params};
    const LaneBias bias{own_seen, score.scale};
    const LaneSees sees{own_seen};
    Products::Softmax softmax{score.scale};

    for (int step = 0; first_key(step) < end; ++step) {
        const int first = first_key(step);
        cp_async_wait<num_stages - 2>();
        __syncthreads();  // the keys are there for every warp, and none reads those of the step before any more
        load(step + num_stages - 1);
        if (first >= own_end || first + block_n <= own_begin) continue;  // keys of other warps' rows
        Accumulator<rows, block_n> s;
        products.scores(s, tiles_of(step), step % num_stages);
        score.apply(s);
        bias.add(s, first);
        sees.hide(s, first);
        softmax.update(s, o);
        products.add(o, s, step % num_stages);
    }
    products.scale_sum(o);

    if (work.parts > 1) {
        const PartOfTile<block_m, head_dim> part{params, work, head_k};
        if (own.has(0))
            part.put(parts, work.part, warp_row, softmax, o, [&](int h, float *row) { Products::put(o, h, row); });
        if (!is_last_of(work.parts, parts.arrived + part.first / block_m)) return;
        part.combine(params, parts, work.parts, tile, num_threads, [&](int col) { return columns_v.has(col); });
        return;
    }
    if (!own.has(0)) return;

    finish_rows(params, own, softmax, o);

    // A warp's rows of Q are read by that warp alone, so it may put its rows of O in their place.
    Products::store(shared_q, warp_row, o);
    __syncwarp();
    store_part_by_warp<QTile, rows>(
        shared_q, warp_row, [&](int r) { return own.template element<dtype>(params.o, params.o_stride, r); },
        [&](int r, int col) { return own.has(r) && columns_v.has(col); });
}
