// Rung 44 for packed sequences too.
#include "45_packed_sequences/sequences.cuh"
#include "config.cuh"
#include "epilogue/store_by_tma.cuh"
#include "launch.cuh"
#include "pipeline/roles.cuh"
#include "pipeline/tile_pipeline.cuh"
#include "softmax/mask.cuh"
#include "softmax/optimistic.cuh"
#include "softmax/softcap.cuh"
#include "tile/warpgroup_gemm.cuh"

#include <type_traits>

using namespace config;

constexpr int num_consumers = block_m / warpgroup_rows;  // warpgroups; then comes the producer's
using Share = Registers<num_consumers, 1>;
constexpr bool is_uneven = causal && !window;  // within a window all tiles see about as many keys
constexpr bool ends_early = causal || window;  // a row may see no later key
constexpr bool may_halve = ends_early && block_n > warpgroup_rows;  // a block of 64 keys is on the diagonal of 64 rows whole

using QTile = SwizzledPanels<block_m, head_dim>;
using KVTile = SwizzledPanels<block_n, head_dim>;
using HeldQ = QOperand<16, head_dim, 0, HoistedReader<QTile, dtype>>;

struct Shared {
    alignas(1024) dtype o[QTile::size];
    TilePipeline<QTile, dtype, q_stages> q;
    TilePipeline<KVTile, dtype, num_stages> k, v;
    PlacedTileQueue queue;
};
FLASHLADDER_COUNTERS(tiles_drawn, "1");
struct Counters {
    unsigned *tiles_drawn;
};
using Tensors = std::conditional_t<packed, PackedParams, AttentionParams>;
using Params = std::conditional_t<window || softcap, Bounded<Tensors>, Tensors>;
using Order = std::conditional_t<packed, PackedOrder<block_m>, ApartOrder<block_m, head_dim, is_uneven>>;
constexpr Launch plain = Launch{Share::num_threads, sizeof(Shared), block_m, block_n}
                             .persistent()
                             .by_tma("q", block_m, 64, 128)
                             .by_tma("k", block_n, 64, 128)
                             .by_tma("v", block_n, 64, 128)
                             .by_tma("o", 16, 64, 128);
FLASHLADDER_KERNEL(attention_forward, Params, packed ? plain.over("total_q // block_m + batch", "num_heads", "1") : plain);

extern "C" __global__ void __launch_bounds__(Share::num_threads, 1)
    attention_forward(const __grid_constant__ Params params, const __grid_constant__ Counters counters,
                      const __grid_constant__ QkvoMaps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);

    const Order order(params);
    Mask<causal, window> mask(params);
    const Softcap<softcap> score(params);
    if (threadIdx.x == 0) {
        shared.q.init(num_consumers * 4);
        shared.k.init(num_consumers * 4);
        shared.v.init(num_consumers * 4);
        shared.queue.init(num_consumers * 4);
        fence_mbarrier_init();
    }
    __syncthreads();  // the barriers are made

    if (warpgroup_index() == num_consumers) {
        release_registers<Share::producer>();
        if (threadIdx.x % warpgroup_threads != 0) return;
        auto q_at = shared.q.producer();
        auto k_at = shared.k.producer(), v_at = shared.v.producer();
        Order::Drawer drawer{shared.queue, counters.tiles_drawn, order};
        int4 tile = drawer.draw();
#pragma unroll 1
        while (tile.x != PlacedTileQueue::none) {
            const auto [first_row, head, head_k, batch] = tile;
            const auto at = order.extent(batch);
            if constexpr (packed) mask.take(at.seqlen_q, at.seqlen_k);
            const int last = mask.template blocks<block_n>(min(first_row + block_m, at.seqlen_q)) - 1;
            const int lowest = mask.template first_block<block_n>(first_row);
            if (last >= 0) {
                shared.q.load(q_at, maps.q, at.row_q + first_row, head, at.of_q);
                shared.k.load(k_at, maps.k, at.row_k + last * block_n, head_k, at.of_k);
            }
#pragma unroll 1
            for (int j = last; j >= lowest; --j) {
                if (j > lowest) shared.k.load(k_at, maps.k, at.row_k + (j - 1) * block_n, head_k, at.of_k);
                shared.v.load(v_at, maps.v, at.row_k + j * block_n, head_k, at.of_k);
                if (j == min(last, lowest + 2)) tile = drawer.draw();  // not earlier: another CTA may be free for the tile sooner
            }
            if (last < 0) tile = drawer.draw();
        }
        return;
    }
    take_registers<Share::consumer>();

    const int warp_row = uniform_warp_index() * 16;
    const int group_row = __shfl_sync(0xffffffff, warpgroup_index(), 0) * warpgroup_rows;
    ByRows<KVTile> k_tiles;
    ByColumns<KVTile> v_tiles;
    k_tiles.start(shared.k.tiles[0]);
    v_tiles.start(shared.v.tiles[0]);
    auto q_at = shared.q.consumer();
    auto k_at = shared.k.consumer(), v_at = shared.v.consumer();
    OptimisticSoftmax softmax{score.scale};
    HoistedReader<QTile, dtype> o_place;  // of this warp's rows, until they are stored
    o_place.start(shared.o, warp_row);

    // Releases a tile that only other warpgroups read. It must have come: a phase later, this one would pass for the next.
    auto skip = [](auto &ring, auto &at) {
        ring.wait(at);
        ring.release(at);
    };
    PlacedTileReader reader{shared.queue};
    int tile_row = reader.begin(), next_row;
    for (; tile_row != PlacedTileQueue::none; tile_row = next_row) {
        int seqlen_q = params.seqlen_q;
        if constexpr (packed) {
            const auto at = order.extent(reader.tile().w);
            mask.take(at.seqlen_q, at.seqlen_k);
            seqlen_q = at.seqlen_q;
        }
        const int of_tile = mask.template blocks<block_n>(min(tile_row + block_m, seqlen_q)) - 1;
        const int first_row = tile_row + group_row, end_row = min(first_row + warpgroup_rows, seqlen_q);
        const bool is_there = !is_uneven || first_row >= 0;  // or else it is above the head's first row
        const auto lowest_of_tile = mask.template first_block<block_n>(tile_row);
        const auto lowest = mask.template first_block<block_n>(first_row);
        const int last = (is_there && first_row < end_row ? mask.template blocks<block_n>(end_row) : int(lowest_of_tile)) - 1;
        // What needs no O
        int row, head, of_q;  // of this warp
        auto finalize = [&] {
            const int4 tile = reader.tile();
            const auto at = order.extent(tile.w);
            row = at.row_q + tile.x + warp_row, head = tile.y, of_q = at.of_q;
            next_row = reader.next();  // its wait ends a piece of code, so the rest stays behind the products' start
            wait_for_stores();
            softmax.finalize();
            softmax.store_lse_if(is_there && params.lse != nullptr, order.lse(head, at) + tile.x + warp_row,
                                 at.seqlen_q - tile.x - warp_row);
            reader.release(softmax.is_finalized());  // so all this comes before the wait for O: ptxas would turn them round
        };
        // Blocks that other warpgroups see
        auto skip_blocks = [&](int from, int to) {
#pragma unroll 1
            for (int j = from; j > to; --j) skip(shared.k, k_at), skip(shared.v, v_at);
        };
        skip_blocks(of_tile, last);
        if (last < lowest && of_tile >= 0) skip(shared.q, q_at);

        Accumulator<16, head_dim> o;  // of this warp
        o.clear();

        softmax.reset();
        if (last >= lowest) {
            Accumulator<16, block_n> s;
            HeldA<16, block_n> p;
            std::conditional_t<q_in_registers, HeldQ, ByRows<QTile>> q;
            shared.q.wait(q_at);
            q.start(shared.q.tiles[q_at.stage], q_in_registers ? warp_row : group_row);
            // S = Q K^T of block j, then O += P V of the one before
            auto step = [&](int j, auto is_masked, auto &p_before) {
                constexpr bool masked = decltype(is_masked)::value;
                shared.k.wait(k_at);
                start_product<dtype, head_dim>(s, q, k_tiles.after(k_at.stage));
                shared.v.wait(v_at);
                start_sum<dtype>(o, p_before, v_tiles.after(v_at.stage));

                // P = 2^(unit * S - m); O follows the new m as soon as it is at hand
                wait_for<1>(s);
                auto bound = [&] {
                    score.apply(s);
                    if constexpr (masked) mask.hide(s, tile_row + warp_row, j * block_n);
                };
                bound();
                auto recompute = [&] {
                    scores_of_warp<KVTile>(s, q, shared.k.tiles[k_at.stage], shared.q.tiles[q_at.stage], warp_row);
                };
                softmax.update(s, [&] { recompute(), bound(); }, masked && softmax.has_new_rows());
                shared.k.release(k_at, softmax.is_summed());  // so P comes before the wait for O: ptxas would turn them round
                wait_for(o, p_before);
                shared.v.release(v_at);
                softmax.rescale(o);
                p = round_to_operand<dtype>(s);
            };
            int j = last - 1;
            // S = Q K^T and P = 2^(unit * S - m) of the first block's first keys. The last of a warpgroup's rows sees 63 keys
            // more than the first, and a block has 64 at least, so the second block is masked too, and no other one.
            auto begin = [&](auto keys) {
                Accumulator<16, decltype(keys)::value> s;
                shared.k.wait(k_at);
                start_product<dtype, head_dim>(s, q, k_tiles.after(k_at.stage));
                wait_for(s);
                // A load may come late, but a product has used what it brought.
                if constexpr (q_in_registers) shared.q.release(q_at);
                shared.k.release(k_at);
                score.apply(s);
                mask.hide(s, tile_row + warp_row, last * block_n);
                softmax.start(s);
                auto p_first = round_to_operand<dtype>(s);
                if (ends_early && j >= lowest)
                    step(j--, std::true_type(), p_first);
                else
                    p = widen<block_n>(p_first);
            };
            using Half = std::integral_constant<int, may_halve ? warpgroup_rows : block_n>;
            using Whole = std::integral_constant<int, block_n>;
            if (may_halve && mask.keys(end_row - 1) - last * block_n <= warpgroup_rows)
                begin(Half());
            else
                begin(Whole());
            const auto lowest_plain = mask.template first_plain_block<block_n>(end_row - 1);
            for (; j >= lowest_plain; --j) step(j, std::false_type(), p);
            if constexpr (window)
                for (; j >= lowest; --j) step(j, std::true_type(), p);
            if constexpr (!q_in_registers) shared.q.release(q_at);
            shared.v.wait(v_at);
            start_sum<dtype, block_n>(o, p, v_tiles.after(v_at.stage));
            finalize();
            wait_for(o, p);
            shared.v.release(v_at);
            if constexpr (window) skip_blocks(lowest, lowest_of_tile);
        } else {
            finalize();
        }

        softmax.normalize(o);
        if (is_there) start_store<QTile>(shared.o, warp_row, o_place, o, maps.o, row, head, of_q);
    }
    wait_for_stores();  // shared memory lives as long as its CTA
}
