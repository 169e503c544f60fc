// Dropout where scores come from wgmma. A mask depends on places alone, so a warpgroup of its own draws it, ahead of those that
// compute. A ring in shared memory brings it to them.
#pragma once
#include "pipeline/state.cuh"
#include "ptx/sm90.cuh"
#include "schedule/packed.cuh"
#include "schedule/work_tile.cuh"
#include "softmax/dropout.cuh"

// The masks of blocks of keys, a bit for each score of `warps` warps. `drawers` warps draw them, the last ones of a CTA's.
// Without dropout it has no stages.
template <int cols, int warps, int stages, int drawers = 4>
struct MaskRing {
    static_assert(stages == 0 || (cols % 32 == 0 && cols <= 128), "squares are drawn two by two; a word has 4 times 8 bits");
    using State = PipelineState<stages>;
    uint32_t words[stages][warps][2][32];  // of each two squares the first and the second one, lane by lane
    Mbarrier full[stages];                 // all drawers have drawn their share
    Mbarrier empty[stages];                // every consuming warp has read its own

    static __device__ State producer() { return {1}; }

    __device__ void init() {
        for (int stage = 0; stage < stages; ++stage) {
            full[stage].init(drawers);
            empty[stage].init(warps);
        }
    }

    // A drawer's share of the next block: the rows of each warp in `drawers`.
    __device__ void draw(State &at, const Dropout<stages != 0> &of, int first_row, int first_key) {
        const int drawer = uniform_warp_index() % drawers;
        empty[at.stage].wait(at.parity);
#pragma unroll
        for (int warp = 0; warp < warps; warp += drawers)
            draw_rows(words[at.stage][warp + drawer], of, first_row + (warp + drawer) * 16, first_key);
        __syncwarp();
        full[at.stage].arrive_as_warp();
        at.advance();
    }

  private:
    // A call of the generator has half of its scores from the lane that makes it, and half from the lane 4 beside it.
    __device__ static void draw_rows(uint32_t (&to)[2][32], const Dropout<stages != 0> &of, int first_row, int first_key) {
        const int lane = lane_index(), square = lane / 4 % 2;
        uint32_t own = 0, others = 0;
#pragma unroll
        for (int col = cols - 32; col >= 0; col -= 32) {
            const uint4 kept = of.template call<false>(first_row / 16 * 4 + lane / 8, (first_key + col) / 16 * 4 + lane % 8);
            own = push(push(own, kept.y), kept.x);
            others = push(push(others, kept.w), kept.z);
        }
        to[square][lane] = own;
        to[square][lane ^ 4] = others;
    }

    // In each byte the top bit comes before those that are there.
    __device__ static uint32_t push(uint32_t bits, uint32_t tops) { return bits >> 1 | (tops & 0x80808080); }
};

// A consumer warp's end of the ring, and its mask of one block. Without dropout it is nothing.
template <class T, class Ring, bool dropout>
struct DrawnMask {
    Ring &ring;
    typename Ring::State at;
    uint32_t words[2], selector;
    uint32_t all[8][4], masks[8][4];  // of a block of P, as operands have it

    // A tile's rows begin at a multiple of 32.
    __device__ explicit DrawnMask(Ring &ring_) : ring(ring_), at{0}, selector(KeptPairs<false>::selector_of(warp_index())) {}

    // The next block's.
    __device__ void take() {
        if constexpr (dropout) {
            ring.full[at.stage].wait(at.parity);
#pragma unroll
            for (int square = 0; square < 2; ++square)
                words[square] = ring.words[at.stage][warp_index()][square][lane_index()];
            __syncwarp();  // all lanes have read theirs
            release();
        }
    }
    // One that only other warps need.
    __device__ void skip() {
        if constexpr (dropout) {
            ring.full[at.stage].wait(at.parity);
            release();
        }
    }

    // S, which is P by now, becomes an operand without the weights that are dropped, in two steps; the softmax weighs all of
    // them. The first step takes the registers of S alone, so it may come while P of the block before is still read; the second
    // is short.
    template <int cols, class Softmax>
    __device__ void round(const Accumulator<16, cols> &s, Softmax &softmax) {
        if constexpr (dropout) {
            const auto p = round_to_operand<T>(s);
            softmax.weigh(p);
#pragma unroll
            for (int step = 0; step < cols / 16; ++step) {
                const uint32_t first = words[step % 2] << step / 2 * 2;
                const KeptPairs<false> pairs{{{first, first << 1}}, selector};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    all[step][i] = p.block[step][0][i];
                    masks[step][i] = pairs.mask(0, i);
                }
            }
        }
    }
    template <int cols>
    __device__ HeldA<16, cols> rounded(const Accumulator<16, cols> &s) const {
        if constexpr (dropout) {
            HeldA<16, cols> p;
#pragma unroll
            for (int step = 0; step < cols / 16; ++step)
#pragma unroll
                for (int i = 0; i < 4; ++i) p.block[step][0][i] = all[step][i] & masks[step][i];
            return p;
        } else {
            return round_to_operand<T>(s);
        }
    }

  private:
    __device__ void release() {
        ring.empty[at.stage].arrive_as_warp();
        at.advance();
    }
};

// The number of a work tile's sequence in the batch.
__device__ inline int sequence_of(const AttentionParams &, const WorkTileReader &work) { return work.get(&WorkTile::batch_q); }

// Of packed sequences, which has rows: as many others begin at its first row or before.
__device__ inline int sequence_of(const PackedParams &params, const WorkTileReader &work) {
    const int begin = work.get(&WorkTile::batch_q) - work.get(&WorkTile::seqlen_q);
    int others = 0;
    for (int b = lane_index() + 1; b < params.batch; b += 32) others += __ldg(params.cu_seqlens_q + b) <= begin;
    return __reduce_add_sync(0xffffffff, others);
}
