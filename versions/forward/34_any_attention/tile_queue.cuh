// Tiles of different length, for a persistent grid: a CTA draws its next tile when it is ready for one.
#pragma once
#include "params.cuh"
#include "ptx/sm90.cuh"
#include "schedule/l2_sections.cuh"

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
            longest_first(number, blocks, heads, section, block, any_head);
        }
        const int head = any_head % params.num_heads;
        return {block * block_m, head, head / (params.num_heads / params.num_heads_k), any_head / params.num_heads};
    }
    __device__ float *lse(int head, int batch) const {
        return params.lse + (static_cast<long long>(batch) * params.num_heads + head) * params.seqlen_q;
    }
    __device__ float *lse(const Tile &tile) const { return lse(tile.head, tile.batch) + tile.first_row; }
};

// What a producer draws goes through shared memory to the consumers. One place is read while the next one is filled.
template <class Work>
struct WorkQueue {
    static constexpr int none = -1;  // instead of a tile's number or first row, when all are drawn
    Work work[2];
    Mbarrier full[2], empty[2];

    __device__ void init(int reading_warps) {
        for (int place = 0; place < 2; ++place) {
            full[place].init(1);
            empty[place].init(reading_warps);
        }
    }
    // Work is counted from 0. A producer acquires its place and commits it, a consumer waits for it and releases it.
    __device__ void acquire(int number) { empty[number % 2].wait(number / 2 % 2 ^ 1); }
    __device__ void commit(int number) { full[number % 2].arrive(); }
    __device__ void wait(int number) { full[number % 2].wait(number / 2 % 2); }
    __device__ void release(int number) { empty[number % 2].arrive_as_warp(); }
};
using TileQueue = WorkQueue<int>;

// The producer's end. The first tile is the CTA's own number; `counter`, which is 0 at first, gives the others. Each
// CTA draws once in vain, so there are `count` draws in all, and the last one sets it to 0 again.
struct TileDrawer {
    TileQueue &queue;
    unsigned *counter;
    const int count;
    int drawn = 0;

    __device__ int draw() {
        const int next = drawn == 0 ? blockIdx.x : gridDim.x + atomicInc(counter, count - 1);
        queue.acquire(drawn);
        queue.work[drawn % 2] = next < count ? next : TileQueue::none;
        queue.commit(drawn);
        ++drawn;
        return next < count ? next : TileQueue::none;
    }
};

// A consumer's.
struct TileReader {
    TileQueue &queue;
    int taken = 0;

    __device__ int next() {
        queue.wait(taken);
        const int number = queue.work[taken % 2];
        __syncwarp();  // all lanes have read it
        queue.release(taken);
        ++taken;
        return number;
    }
};
