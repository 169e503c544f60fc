// Tiles of a persistent grid: the producer draws them ahead, and tells the consumers where they are.
#pragma once
#include "34_any_attention/tile_queue.cuh"

using PlacedTileQueue = WorkQueue<int4>;  // first row, head, head of K and V, batch

// The producer's end; the counter is TileDrawer's. Where a tile is takes several divisions, of which consumers do none.
template <class Order>
struct PlacedTileDrawer {
    PlacedTileQueue &queue;
    unsigned *counter;
    const Order &order;
    int drawn = 0;

    __device__ int4 draw() {
        const int number = drawn == 0 ? blockIdx.x : next();
        int4 tile{PlacedTileQueue::none, 0, 0, 0};
        if (number < order.count) {
            const auto found = order.tile(number);
            tile = {found.first_row, found.head, found.head_k, found.batch};
        }
        return hand_over(tile);
    }
    __device__ int4 hand_over(int4 tile) {
        queue.acquire(drawn);
        queue.work[drawn % 2] = tile;
        queue.commit(drawn);
        ++drawn;
        return tile;
    }
    __device__ int next() const { return gridDim.x + atomicInc(counter, order.count - 1); }
};

// A consumer's. The compiler is to know that what it reads is the same in a warp, as TMA wants the place of a tile.
struct PlacedTileReader {
    PlacedTileQueue &queue;
    int taken = 0;

    // The tile's first row, or `none`.
    __device__ int begin() const {
        queue.wait(taken);
        return same(queue.work[taken % 2].x);
    }
    // All of it, read again at the tile's end: in between it needs no registers.
    __device__ int4 tile() const {
        const int4 tile = queue.work[taken % 2];
        return {same(tile.x), same(tile.y), tile.z, same(tile.w)};
    }
    // As `begin`, of the next tile.
    __device__ int next() {
        ++taken;
        return begin();
    }
    // Releases the slot of the tile before. A __syncwarp has been since `tile`, so all lanes have read it.
    __device__ void release(bool really) {
        if (really) queue.release(taken - 1);
    }

  private:
    __device__ static int same(int x) { return __shfl_sync(0xffffffff, x, 0); }
};
