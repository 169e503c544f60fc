// Tiles of a persistent grid, each a CTA's turn: the producer draws them ahead, and tells the consumers where they are.
#pragma once
#include "schedule/tile_queue.cuh"

// One place is read while the next turn comes to the other one.
struct TurnQueue {
    static constexpr int none = -1;  // instead of a first row, when all tiles are drawn
    int4 turn[2];                    // first row, head, head of K and V, batch
    Mbarrier full[2], empty[2];

    __device__ void init(int reading_warps) {
        for (int place = 0; place < 2; ++place) {
            full[place].init(1);
            empty[place].init(reading_warps);
        }
    }
};

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
    __device__ int next() const { return gridDim.x + atomicInc(counter, order.count - 1); }
    __device__ int4 hand_over(int4 turn) {
        const int place = drawn % 2;
        queue.empty[place].wait(drawn / 2 % 2 ^ 1);
        queue.turn[place] = turn;
        queue.full[place].arrive();
        ++drawn;
        return turn;
    }
};

// A consumer's. The compiler is to know that what it reads is the same in a warp, as TMA wants the place of a tile.
struct TurnReader {
    TurnQueue &queue;
    int taken = 0;

    // The tile's first row, or `none`.
    __device__ int begin() const {
        queue.full[taken % 2].wait(taken / 2 % 2);
        return same(queue.turn[taken % 2].x);
    }
    // All of it, read again at the tile's end: in between it needs no registers.
    __device__ int4 turn() const {
        const int4 turn = queue.turn[taken % 2];
        return {same(turn.x), same(turn.y), turn.z, same(turn.w)};
    }
    // As `begin`, of the next tile.
    __device__ int next() {
        ++taken;
        return begin();
    }
    // Gives back the place of the tile before. A __syncwarp has been since `turn`, so all lanes have read it.
    __device__ void release(bool really) {
        if (really) queue.empty[(taken - 1) % 2].arrive_as_warp();
    }

  private:
    __device__ static int same(int x) { return __shfl_sync(0xffffffff, x, 0); }
};
