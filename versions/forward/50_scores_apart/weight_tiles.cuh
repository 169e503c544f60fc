// P of blocks of keys on its way from the warpgroup that computes it to those that multiply with it.
#pragma once
#include "pipeline/state.cuh"
#include "softmax/sinks.cuh"
#include "tile/reader.cuh"
#include "tile/rows.cuh"
#include "tile/warpgroup_gemm.cuh"

// A ring of tiles of P, and by what each row of O is multiplied before P V is added. Warp w of each warpgroup has rows from
// 16 * w on. What is passed last of a work tile has no P.
template <class Tile, class T, int stages>
struct alignas(1024) WeightRing {
    using State = PipelineState<stages>;
    T tiles[stages][Tile::size];
    float factors[stages][Tile::rows];
    int scales[stages][Tile::rows / 16];  // whether some factor of the warp's rows is not 1
    Mbarrier full[stages];                // every producing warp has put its rows there
    Mbarrier empty[stages];               // every consuming warp is done with them

    // Before the other threads come, and `fence_mbarrier_init` after it.
    __device__ void init(int producers, int consumers) {
        for (int stage = 0; stage < stages; ++stage) {
            full[stage].init(producers);
            empty[stage].init(consumers);
        }
    }

    // The end of a warp that computes P.
    struct Producer {
        WeightRing &ring;
        HoistedReader<Tile, T> place;
        int warp_row;
        State at{1};

        __device__ Producer(WeightRing &ring_, int warp_row_) : ring(ring_), warp_row(warp_row_) {
            place.start(ring.tiles[0], warp_row);
        }
        // P of a block, and factors where some are not 1.
        template <int cols>
        __device__ void pass(const HeldA<16, cols> &p, bool scales, const float (&factor)[2]) {
            put(scales, factor);
#pragma unroll
            for (int step = 0; step < cols / 16; ++step)
                stmatrix_x4(place.address(0, step * 16) + at.stage * Tile::size * sizeof(T), p.block[step][0]);
            fence_proxy_async();  // products see what each lane wrote
            tell();
        }
        // Factors alone.
        __device__ void pass(const float (&factor)[2]) {
            put(true, factor);
            tell();
        }

      private:
        __device__ void put(bool scales, const float (&factor)[2]) {
            ring.empty[at.stage].wait(at.parity);
            if (lane_index() == 0) ring.scales[at.stage][warp_row / 16] = scales;
            if (scales && lane_index() % 4 == 0)
                each_row([&](int h) { ring.factors[at.stage][warp_row + h * 8 + accumulator_row()] = factor[h]; });
        }
        __device__ void tell() {
            __syncwarp();  // all lanes have written
            ring.full[at.stage].arrive_as_warp();
            at.advance();
        }
    };

    // The end of a warp that multiplies with it.
    struct Consumer {
        WeightRing &ring;
        ByRows<Tile> first;
        int warp_row;
        State at{0};

        __device__ Consumer(WeightRing &ring_, int warp_row_) : ring(ring_), warp_row(warp_row_) { first.start(ring.tiles[0]); }
        __device__ void wait() const { ring.full[at.stage].wait(at.parity); }
        __device__ ByRows<Tile> p() const { return first.after(at.stage); }

        // A row whose factor is 0 becomes 0, even where it is NaN.
        template <int cols>
        __device__ void scale(Accumulator<16, cols> &o) const {
            if (!ring.scales[at.stage][warp_row / 16]) return;
            each_row([&](int h) {
                const float factor = ring.factors[at.stage][warp_row + h * 8 + accumulator_row()];
                each_element(o, h, [&](float &x) { x = factor == 0.0f ? 0.0f : x * factor; });
            });
        }
        __device__ void release() {
            __syncwarp();  // all lanes have read their factors
            ring.empty[at.stage].arrive_as_warp();
            at.advance();
        }
    };
};

// 1 / l of a row whose keys' P sums to `of_keys`; 0 of a row that sees no key. A sink joins l. Newton's step makes an
// approximation as good as a division for these l, which are not near an end of fp32's range.
template <bool sinks>
__device__ inline float share_of(float of_keys, float m, const Sink<sinks> &sink) {
    const float l = sink.in_sum(of_keys, m), near = reciprocal_approx(l);
    return of_keys == 0.0f ? 0.0f : fmaf(near, -fmaf(l, near, -1.0f), near);
}
