// Tiles of a persistent grid, each a CTA's turn: the producer draws them ahead, and tells the consumers where they are.
#pragma once
#include "schedule/tile_queue.cuh"

using TurnQueue = WorkQueue<int4>;  // first row, head, head of K and V, batch

// The producer's end; the counter is TileDrawer's. Where a tile is takes several divisions, of which consumers do none.
template <class Order>
struct TurnDrawer {
    TurnQueue &queue;
    unsigned *counter;
    const Order &order;
    int drawn = 0;

    __device__ int4 draw() {
        const int number = drawn == 0 ? blockIdx.x : next();
        int4 turn{TurnQueue::none, 0, 0, 0};
        if (number < order.count) {
            const auto tile = order.tile(number);
            turn = {tile.first_row, tile.head, tile.head_k, tile.batch};
        }
        return hand_over(turn);
    }
    __device__ int4 hand_over(int4 turn) {
        queue.acquire(drawn);
        queue.work[drawn % 2] = turn;
        queue.commit(drawn);
        ++drawn;
        return turn;
    }
    __device__ int next() const { return gridDim.x + atomicInc(counter, order.count - 1); }
};

// A consumer's. The compiler is to know that what it reads is the same in a warp, as TMA wants the place of a tile.
struct TurnReader {
    TurnQueue &queue;
    int taken = 0;

    // The tile's first row, or `none`.
    __device__ int begin() const {
        queue.wait(taken);
        return same(queue.work[taken % 2].x);
    }
    // All of it, read again at the tile's end: in between it needs no registers.
    __device__ int4 turn() const {
        const int4 turn = queue.work[taken % 2];
        return {same(turn.x), same(turn.y), turn.z, same(turn.w)};
    }
    // As `begin`, of the next tile.
    __device__ int next() {
        ++taken;
        return begin();
    }
    // Gives back the place of the tile before. A __syncwarp has been since `turn`, so all lanes have read it.
    __device__ void release(bool really) {
        if (really) queue.release(taken - 1);
    }

  private:
    __device__ static int same(int x) { return __shfl_sync(0xffffffff, x, 0); }
};
