// dK and dV where a CTA has one head of Q (`split_heads`): fp32 sums over the heads that share one of K, in global memory, as
// warps hold them. A warp's dV lies before its dK.
#pragma once
#include "any_attention.cuh"
#include "dq_bulk.cuh"
#include "key_order.cuh"
#include "ptx/griddepcontrol.cuh"
#include "warpgroup_tiles.cuh"

constexpr bool sums_keys = config::split_heads && config::wants_dkv;
constexpr int key_warps = config::block_n / 16;  // of a tile
using KeySums = Accumulator<16, config::head_dim>;
constexpr int warp_key_sums = 16 * config::head_dim;

struct SummedWorkspaces : CountedWorkspaces {
    float *key_sums;
    unsigned *keys_stored;  // of each warp of a tile of keys: whether the first head's dV and dK are there
};

// The loop's grid.
constexpr Launch over_keys_and_heads(const Launch &launch) {
    return config::split_heads ? over_tiles_of_keys(launch, "num_heads") : over_tiles_of_keys(launch, "num_heads_k");
}

__device__ inline int head_of_keys(const Params &p, int head) { return head / (p.num_heads / p.num_heads_k); }

// The tiles of Q that see a CTA's keys: of a head of Q, or of all that share a head of K.
__device__ inline RowTiles tiles_of_heads(const Mask &mask, const Work &work, int first_key, int last_key, int head) {
    const int group_heads = work.p.num_heads / work.p.num_heads_k, end_row = min(mask.end_row(last_key), work.seqlen_q);
    const int first_row = mask.first_row(first_key);
    if constexpr (config::split_heads) return {first_row, end_row, head, 1};
    return {first_row, end_row, head * group_heads, group_heads};
}

// Zeros for the counters, by all CTAs of a grid.
__device__ inline void clear_counters(unsigned *stored, const Work &work) {
    const long long cta = blockIdx.x + gridDim.x * (blockIdx.y + static_cast<long long>(gridDim.y) * blockIdx.z);
    const long long threads = static_cast<long long>(gridDim.x) * gridDim.y * gridDim.z * blockDim.x;
    const long long count = work.key_places() * work.p.num_heads_k * key_warps;
    for (long long i = cta * blockDim.x + threadIdx.x; i < count; i += threads) stored[i] = 0;
}

// Adds a warp's dV and dK to the sums, from where K and V were, which nobody reads any more. The first head of a group stores them,
// so that nobody need write zeros, and the others wait for that: it was launched before them.
__device__ inline void sum_keys(const SummedWorkspaces &workspaces, const Work &work, config::dtype *keys, int head, int key_tile,
                                KeySums &dv, KeySums &dk) {
    static_assert(key_warps * warp_key_sums * sizeof(float) <= 2 * KTile::size * sizeof(config::dtype));
    const int head_k = head_of_keys(work.p, head), warp = uniform_warp_index();
    const bool is_first = head == head_k * (work.p.num_heads / work.p.num_heads_k);
    const long long place = work.key_place(head_k, key_tile) * key_warps + warp;
    float *staged = reinterpret_cast<float *>(keys) + warp * warp_key_sums;
    float *sums = workspaces.key_sums + place * 2 * warp_key_sums;
    unsigned *stored = workspaces.keys_stored + place;
    auto sum = [&](float *to, KeySums &of_warp) {
        stage_sums(staged, of_warp);
        if (lane_index() == 0) {
            if (is_first)
                bulk_store(to, staged, warp_key_sums * sizeof(float));
            else
                bulk_add(to, staged, warp_key_sums * sizeof(float));
            tma_store_commit();
        }
        wait_for_stores();
    };
    if (!is_first && lane_index() == 0) {
        wait_for_dependency();  // the counter was zero
        wait_for_first(stored);
    }
    sum(sums, dv);
    sum(sums + warp_key_sums, dk);
    if (is_first && lane_index() == 0) {
        tma_store_wait();
        add_release(stored, 1);
    }
}

// The last pass: of a tile of keys and a head of K.
constexpr Launch last_pass_of_keys(int threads, int shared_bytes) {
    const Launch plain{static_cast<unsigned>(threads), static_cast<unsigned>(shared_bytes), config::block_m, config::block_n};
    const Launch over_keys = over_tiles_of_keys(plain.dependent(), "num_heads_k");
    return sums_keys ? over_keys : over_keys.over("0", "0", "0");
}
__device__ inline void finish_keys(const Params &p, const SummedWorkspaces &workspaces, config::dtype *shared) {
    const auto place = keys_of_cta<config::packed, false>(p);
    const Work work{p, place.batch};
    if (config::packed && !place.is_in(work.seqlen_k, config::block_n)) return clear_keys_behind<key_warps * 32>(work, place);
    const int first_key = place.number * config::block_n, end_key = min(config::block_n, work.seqlen_k - first_key);
    const bool is_seen = tiles_of_heads(mask_of(work), work, first_key, first_key + end_key - 1, 0).count() > 0;
    const int warp = warp_index();
    float *sums = workspaces.key_sums +
                  (work.key_place(place.head, place.number) * key_warps + warp) * 2 * warp_key_sums;
    wait_for_dependency();  // the sums are complete
    auto store = [&](float *from, float by, config::dtype *tensor, const TensorStride &stride, const auto &columns) {
        KeySums sum = is_seen ? load_sums<config::head_dim>(from) : KeySums{};
        scale(sum, by);
        store_keys(shared, warp * 16, work.like_k(tensor, stride, place.head), stride.row, first_key, end_key, sum, columns);
        __syncwarp();  // the place is free again
    };
    const float rescale = config::dropout ? Dropout<config::dropout>{p, work.batch, 0}.rescale : 1.0f;
    store(sums, rescale, p.dv, p.dv_stride, columns_of_v<config::narrower>(p));
    store(sums + warp_key_sums, p.softmax_scale, p.dk, p.dk_stride, columns_of<config::narrower>(p));
}
