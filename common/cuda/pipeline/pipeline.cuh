// A ring of tiles in shared memory. One thread, the producer, has TMA load them, and warps consume them.
#pragma once
#include "pipeline/state.cuh"
#include "pipeline/tma.cuh"

// The barriers of the ring. The tiles lie elsewhere.
template <class Tile, int stages>
struct Pipeline {
    using State = PipelineState<stages>;
    Mbarrier full[stages];   // the tile has come
    Mbarrier empty[stages];  // every consuming warp is done with it

    static __device__ State producer() { return {1}; }
    static __device__ State consumer() { return {0}; }

    // Before the other threads come, and `fence_mbarrier_init` after it.
    __device__ void init(int consumer_warps) {
        for (int stage = 0; stage < stages; ++stage) {
            full[stage].init(1);
            empty[stage].init(consumer_warps);
        }
    }

    // Starts loading rows from `row` on of one head into the next tile, panel by panel, once it is empty.
    template <class T>
    __device__ void load(State &at, T (&tiles)[stages][Tile::size], const TensorMapBytes &map, int row, int head, int batch) {
        empty[at.stage].wait(at.parity);
        load_tile<Tile>(tiles[at.stage], map, full[at.stage], row, head, batch);
        at.advance();
    }
    __device__ void wait(const State &at) { full[at.stage].wait(at.parity); }
    __device__ void release(State &at, bool really = true) {
        if (really) empty[at.stage].arrive_as_warp();
        at.advance();
    }
};

// A consumer's end of a pipeline whose tiles are operands of products; `Operand` is ByRows or ByColumns.
template <class Pipeline, class Operand>
struct OperandConsumer {
    Pipeline &pipeline;
    typename Pipeline::State at;
    Operand first;  // of the ring's tiles

    template <class T>
    __device__ OperandConsumer(Pipeline &pipeline_, const T *tiles) : pipeline(pipeline_), at(pipeline.consumer()) {
        first.start(tiles);
    }
    __device__ Operand operand() const { return first.after(at.stage); }
    __device__ void wait() const { pipeline.wait(at); }
    __device__ void release(bool really = true) { pipeline.release(at, really); }
    // A tile that only other warps need. It must have come: a phase later, this one would pass for the next.
    __device__ void skip() {
        wait();
        release();
    }
};
