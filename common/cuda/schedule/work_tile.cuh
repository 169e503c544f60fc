// A persistent grid in which a warp of its own schedules: it looks up where the next tile is while the producer loads and
// the consumers compute.
#pragma once
#include "tile/layout.cuh"
#include "ptx/sm90.cuh"

// All there is to know of a tile.
struct alignas(16) WorkTile {
    static constexpr int none = -1;  // instead of a first row, when all tiles are drawn
    int first_row, end_row;          // of its sequence; it may end before its block_m rows are full
    int head, head_k;
    int seqlen_q, seqlen_k;
    int row_q, row_k;      // the sequence's first rows as tensor maps count them
    int batch_q, batch_k;  // and the maps' last coordinate
    float *lse;            // of the sequence's first row
};

// Work tiles on their way from the scheduler to the producer and the consumers: one is read while the next one comes.
// `wanted` is the producer's word to the scheduler. `full` says that a work tile is there, `empty` that all consumer warps are
// done with it. The producer need not say so: when it asks for one more, it has read all of the one before.
struct WorkTileQueue {
    WorkTile tile[2];
    Mbarrier wanted, full[2], empty[2];

    __device__ void init(int consumer_warps) {
        wanted.init(1);
        for (int slot = 0; slot < 2; ++slot) {
            full[slot].init(1);
            empty[slot].init(consumer_warps);
        }
    }
    // The producer's, once a tile: it is soon ready for the next one.
    __device__ void request() { wanted.arrive(); }
};

// The scheduler: a whole warp. The first tile is the CTA's own number; `counter`, which is 0 at first, gives the others.
// Each CTA draws once in vain, so there are `count` draws in all, and the last one sets it to 0 again.
template <class Order>
__device__ inline void schedule(WorkTileQueue &queue, unsigned *counter, Order order) {
    int number = blockIdx.x;
#pragma unroll 1
    for (int drawn = 0;; ++drawn) {
        const bool is_tile = number < order.count;
        WorkTile tile{WorkTile::none};
        if (is_tile) tile = order.find(number);
        const int slot = drawn % 2;
        queue.empty[slot].wait(drawn / 2 % 2 ^ 1);
        if (lane_index() == 0) {
            queue.tile[slot] = tile;
            queue.full[slot].arrive();
        }
        if (!is_tile) return;
        queue.wanted.wait(drawn % 2);
        if (lane_index() == 0) number = gridDim.x + atomicInc(counter, order.count - 1);
        number = __shfl_sync(0xffffffff, number, 0);
    }
}

// A reader of the queue. The compiler is to know that what it reads is the same in a warp, as TMA wants the coordinates of
// a tile.
struct WorkTileReader {
    WorkTileQueue &queue;
    int count = 0;  // tiles that it is done with

    // The tile, once it has come.
    __device__ const WorkTile &wait() const {
        queue.full[count % 2].wait(count / 2 % 2);
        return queue.tile[count % 2];
    }
    // The tile's first row, or `none`, once it has come.
    __device__ int first_row() const {
        wait();
        return get(&WorkTile::first_row);
    }
    // Anything of it, read when it is needed: in between it needs no registers.
    __device__ int get(int WorkTile::*what) const { return __shfl_sync(0xffffffff, queue.tile[count % 2].*what, 0); }
    __device__ float *lse() const { return queue.tile[count % 2].lse; }

    __device__ void advance() { ++count; }
    // Of the tile before. A __syncwarp has been since it was read, so all lanes have read it.
    __device__ void release(bool really) {
        if (really) queue.empty[(count - 1) % 2].arrive_as_warp();
    }
};
