// A persistent grid in which a warp of its own draws the tiles: it looks up where the next one is while the producer
// loads and the consumers compute.
#pragma once
#include "ptx/sm90.cuh"
#include "tile/layout.cuh"

// All there is to know of a tile.
struct alignas(16) Turn {
    static constexpr int none = -1;  // instead of a first row, when all tiles are drawn
    int first_row, end_row;          // of its sequence; it may end before its block_m rows are full
    int head, head_k;
    int seqlen_q, seqlen_k;
    int row_q, row_k;  // the sequence's first rows as tensor maps count them; and their last coordinate
    int of_q, of_k;
    float *lse;  // of the sequence's first row
};

// One place is read while the next turn comes to the other one.
struct Schedule {
    Turn turn[2];
    Mbarrier wanted, full[2], empty[2];

    __device__ void init(int consuming_warps) {
        wanted.init(1);
        for (int place = 0; place < 2; ++place) {
            full[place].init(1);
            empty[place].init(consuming_warps);
        }
    }
};

// The scheduler: a whole warp. The first tile is the CTA's own number; `counter`, which is 0 at first, deals out the
// others. Each CTA draws once in vain, so there are `count` draws in all, and the last one sets it to 0 again.
template <class Order>
__device__ inline void deal(Schedule &schedule, unsigned *counter, Order order) {
    int number = blockIdx.x;
#pragma unroll 1
    for (int drawn = 0;; ++drawn) {
        const bool is_tile = number < order.count;
        Turn turn{Turn::none};
        if (is_tile) turn = order.find(number);
        const int place = drawn % 2;
        schedule.empty[place].wait(drawn / 2 % 2 ^ 1);
        if (lane_index() == 0) {
            schedule.turn[place] = turn;
            schedule.full[place].arrive();
        }
        if (!is_tile) return;
        schedule.wanted.wait(drawn % 2);
        if (lane_index() == 0) number = gridDim.x + atomicInc(counter, order.count - 1);
        number = __shfl_sync(0xffffffff, number, 0);
    }
}

// A reader's end. The compiler is to know that what it reads is the same in a warp, as TMA wants the place of a tile.
struct Turns {
    Schedule &schedule;
    int taken = 0;

    // The turn, once it has come.
    __device__ const Turn &wait() const {
        schedule.full[taken % 2].wait(taken / 2 % 2);
        return schedule.turn[taken % 2];
    }
    // The tile's first row, or `none`.
    __device__ int begin() const {
        wait();
        return at(&Turn::first_row);
    }
    // Anything of it, read when it is needed: in between it needs no registers.
    __device__ int at(int Turn::*what) const { return __shfl_sync(0xffffffff, schedule.turn[taken % 2].*what, 0); }
    __device__ float *lse() const { return schedule.turn[taken % 2].lse; }
    // As `begin`, of the next tile.
    __device__ int next() {
        ++taken;
        return begin();
    }
    // Gives back the place of the tile before. A __syncwarp has been since it was read, so all lanes have read it.
    __device__ void release(bool really) {
        if (really) schedule.empty[(taken - 1) % 2].arrive_as_warp();
    }
};
