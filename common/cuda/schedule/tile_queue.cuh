// Tiles of different length, for a persistent grid: a CTA draws its next tile when it is ready for one.
#pragma once
#include "params.cuh"
#include "ptx/sm90.cuh"

// Which rows of which head a tile is. Without a mask the rows of a head come first. With a causal mask later rows see
// more keys and take longer: the longest of each head come first, so that all CTAs end together. If K and V of all heads
// are larger than `l2_share`, the heads are taken in sections that fit, but of at least one head of K and V.
template <int block_m, int head_dim, bool causal>
struct TileOrder {
    static constexpr int l2_share = 16 << 20;                      // bytes
    static constexpr int l2_keys = l2_share / (2 * head_dim * 2);  // rows of K and V that fit into it

    const AttentionParams &params;
    const int blocks, heads, count;

    __device__ explicit TileOrder(const AttentionParams &params_)
        : params(params_), blocks((params.seqlen_q + block_m - 1) / block_m), heads(params.num_heads * params.batch),
          count(blocks * heads) {}

    struct Tile {
        int first_row, head, head_k, batch;
    };
    __device__ Tile tile(int number) const {
        int block = number % blocks, any_head = number / blocks;
        if (causal) {
            const int group = params.num_heads / params.num_heads_k;
            const int section = min(max(l2_keys / params.seqlen_k, 1) * group, heads);
            const int first = number / (section * blocks) * section;  // head of this section
            const int within = number - first * blocks, together = min(section, heads - first);
            block = blocks - 1 - within / together;
            any_head = first + within % together;
        }
        const int head = any_head % params.num_heads;
        return {block * block_m, head, head / (params.num_heads / params.num_heads_k), any_head / params.num_heads};
    }
    __device__ float *lse(int head, int batch) const {
        return params.lse + (static_cast<long long>(batch) * params.num_heads + head) * params.seqlen_q;
    }
    __device__ float *lse(const Tile &tile) const { return lse(tile.head, tile.batch) + tile.first_row; }
};

// What the producer draws goes through shared memory to the consumers.
struct TileQueue {
    static constexpr int none = -1;
    static constexpr int slots = 2;
    int number[slots];
    Mbarrier full[slots], empty[slots];

    __device__ void init(int reading_warps) {
        for (int slot = 0; slot < slots; ++slot) {
            full[slot].init(1);
            empty[slot].init(reading_warps);
        }
    }
};

// The producer's end. The first tile is the CTA's own number; `counter`, which is 0 at first, deals out the others. Each
// CTA draws once in vain, so there are `count` draws in all, and the last one sets it to 0 again.
struct TileDrawer {
    TileQueue &queue;
    unsigned *counter;
    const int count;
    int drawn = 0;

    __device__ int draw() {
        const int next = drawn == 0 ? blockIdx.x : gridDim.x + atomicInc(counter, count - 1);
        const int slot = drawn % TileQueue::slots;
        queue.empty[slot].wait(drawn / TileQueue::slots % 2 ^ 1);
        queue.number[slot] = next < count ? next : TileQueue::none;
        queue.full[slot].arrive();
        ++drawn;
        return next < count ? next : TileQueue::none;
    }
};

// A consumer's.
struct TileReader {
    TileQueue &queue;
    int taken = 0;

    __device__ int next() {
        const int slot = taken % TileQueue::slots;
        queue.full[slot].wait(taken / TileQueue::slots % 2);
        const int number = queue.number[slot];
        __syncwarp();  // all lanes have read it
        queue.empty[slot].arrive_as_warp();
        ++taken;
        return number;
    }
};
