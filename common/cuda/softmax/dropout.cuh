// Dropout: which weights count, from the places of their scores alone, so that forward and backward pass agree whatever
// their tiles are. common/problem/dropout.py is the same in Python.
#pragma once
#include "launch.cuh"
#include "ptx/bytes.cuh"
#include "tile/fragment.cuh"

// The parameters of a kernel that has it.
template <class Params>
struct Dropping : Params {
    const int *rng_state;  // two words of seed, one of offset
    int dropped;           // bytes below it are those of weights that are dropped: of 256 as many
    FLASHLADDER_FURTHER_FIELDS(Params, rng_state, dropped)
};

// Philox 4x32 (Salmon et al., SC 2011), of 7 rounds: the fewest that pass BigCrush, and each costs four multiplications.
constexpr int philox_rounds = 7;

// One of them turns a counter, or what the round before made of it, into what the next one takes.
__device__ inline uint4 philox(uint4 counter, uint2 key, int round) {
    constexpr uint32_t first = 0xD2511F53, second = 0xCD9E8D57;
    return {__umulhi(second, counter.z) ^ counter.y ^ (key.x + round * 0x9E3779B9), second * counter.z,
            __umulhi(first, counter.x) ^ counter.w ^ (key.y + round * 0xBB67AE85), first * counter.x};
}

// What a lane keeps of its scores in two squares of an operand, P or with `transposed` P^T, one behind the other along k.
template <bool transposed>
struct KeptPairs {
    uint32_t words[2][2];  // of each square: of the first scores of its pairs and of the second, in each byte's top bit
    uint32_t selector;     // of byte 0

    // The order of a pair's words, of this block of 16 rows.
    __device__ static uint32_t selector_of(int block) { return block % 2 == 0 ? 0xcc88 : 0x88cc; }

    // The bits of what is kept of pair i of a square's block: of 8 x 8 scores, as mma has them.
    __device__ uint32_t mask(int square, int i) const {
        const int byte = transposed ? i : i % 2 * 2 + i / 2;
        return spread_signs(words[square][0], words[square][1], selector + 0x1111 * byte);
    }
};

// The weights of one head. A call of the generator has the 16 scores at rows r, r + 1, r + 8, r + 9 and keys k, k + 1,
// k + 8, k + 9 of a square of 16 by 16, r and k even and below 8. A lane has half of them in an accumulator, of S or of
// S^T; the lane 4 beside it has the others. So of two squares each of the two draws one, and they exchange halves.
//   word 2 * ((row + key / 16) % 2) + (key + row / 16) % 2, byte 2 * (row / 8 % 2) + key / 8 % 2
// With the squares' parity in them, it is the same words that a lane keeps, whichever of the two squares it has drawn.
template <bool dropout>
struct Dropout {
    uint2 seed;
    uint32_t offset, head, dropped;
    float rescale;  // of what is kept

    template <class Params>
    __device__ Dropout(const Params &params, int batch, int head_) {
        if constexpr (dropout) {
            seed = {static_cast<uint32_t>(params.rng_state[0]), static_cast<uint32_t>(params.rng_state[1])};
            offset = params.rng_state[2];
            of_head(params, batch, head_);
            dropped = params.dropped * 0x01010101u;
            rescale = 256.0f / (256 - params.dropped);
        }
    }

    // How many of the weights are kept, as a share of all.
    template <class Params>
    __device__ static float share(const Params &params) {
        if constexpr (dropout) return (256 - params.dropped) / 256.0f;
        return 1.0f;
    }

    // Of the work of a CTA, which assigned() finds.
    template <class Params, class Assigned>
    __device__ Dropout(const Params &params, Assigned assigned) {
        if constexpr (dropout) {
            const auto work = assigned();
            *this = Dropout{params, work.batch, work.head};
        }
    }
    template <class Params>
    __device__ void of_head(const Params &params, int batch, int head_) { head = batch * params.num_heads + head_; }

    // Draws for two squares of an operand's block m of 16 rows, along k from `along` on, a multiple of 32. The operand
    // begins at `first_down`, a multiple of its rows. One step after another, so that they can be woven into a product.
    template <bool transposed, int rows>
    struct Draw {
        static constexpr int steps = philox_rounds + 1;
        uint4 bytes;
        KeptPairs<transposed> pairs;

        __device__ void advance(const Dropout &of, int step, int first_down, int m, int along) {
            const int lane = lane_index();
            if (step == 0) bytes = of.counter<transposed>((first_down / 16 + m) * 4 + lane / 8, along / 16 * 4 + lane % 8);
            if (step < philox_rounds) {
                bytes = philox(bytes, of.seed, step);
                return;
            }
            const bool has_second = lane & 4;  // it has drawn the second one
            of.compare(bytes);
            const uint32_t own[2] = {bytes.x, transposed ? bytes.z : bytes.y};
            const uint32_t others[2] = {transposed ? bytes.y : bytes.z, bytes.w};
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const uint32_t received = __shfl_xor_sync(0xffffffff, others[n], 4);
                pairs.words[0][n] = has_second ? received : own[n];
                pairs.words[1][n] = has_second ? own[n] : received;
            }
            pairs.selector = selector_of<rows>(first_down, m);
        }
    };

    template <bool transposed, int rows>
    __device__ KeptPairs<transposed> draw(int first_down, int m, int along) const {
        Draw<transposed, rows> drawing;
#pragma unroll
        for (int step = 0; step < drawing.steps; ++step) drawing.advance(*this, step, first_down, m, along);
        return drawing.pairs;
    }

    // The first square alone, wherever it is along k: half of what is drawn is of no use.
    template <bool transposed, int rows>
    __device__ KeptPairs<transposed> draw_one(int first_down, int m, int along) const {
        const int lane = lane_index();
        const uint4 bytes = call<transposed>((first_down / 16 + m) * 4 + lane / 8, along / 16 * 4 + lane % 4);
        const bool is_own = (lane / 4 + along / 16) % 2 == 0;
        KeptPairs<transposed> pairs{};
        pairs.words[0][0] = is_own ? bytes.x : (transposed ? bytes.y : bytes.z);
        pairs.words[0][1] = is_own ? (transposed ? bytes.z : bytes.y) : bytes.w;
        pairs.selector = selector_of<rows>(first_down, m);
        return pairs;
    }

    // What is kept of the 16 scores of one call, in the bytes' top bits.
    template <bool transposed>
    __device__ uint4 call(uint32_t down, uint32_t along) const {
        uint4 bytes = counter<transposed>(down, along);
#pragma unroll
        for (int round = 0; round < philox_rounds; ++round) bytes = philox(bytes, seed, round);
        compare(bytes);
        return bytes;
    }

    // Visits the pairs of an operand whose scores begin at a row and a key: visit(step, m, i, mask), where the mask has the
    // bits of what is kept of block[step][m][i].
    template <bool transposed, int rows, int k, class Visit>
    __device__ void each_pair(int first_row, int first_key, Visit visit) const {
        static_assert(k == 16 || k % 32 == 0, "squares are drawn two by two");
        const int first_down = transposed ? first_key : first_row, first_along = transposed ? first_row : first_key;
#pragma unroll
        for (int step = 0; step < k / 16; step += 2)
#pragma unroll
            for (int m = 0; m < rows / 16; ++m) {
                const int along = first_along + step * 16;
                const auto kept = k == 16 ? draw_one<transposed, rows>(first_down, m, along)
                                          : draw<transposed, rows>(first_down, m, along);
#pragma unroll
                for (int square = 0; square < (k == 16 ? 1 : 2); ++square)
#pragma unroll
                    for (int i = 0; i < 4; ++i) visit(step + square, m, i, kept.mask(square, i));
            }
    }

    // Of P, those that are dropped become zero.
    template <int rows, int k>
    __device__ void drop(HeldA<rows, k> &p, int first_row, int first_key) const {
        each_pair<false, rows, k>(first_row, first_key,
                                  [&](int step, int m, int i, uint32_t mask) { p.block[step][m][i] &= mask; });
    }

    // The same, once they are weighed: sums are those of all weights.
    template <class Softmax, int rows, int k>
    __device__ void weigh_and_drop(Softmax &softmax, HeldA<rows, k> &p, int first_row, int first_key) const {
#pragma unroll
        for (int step = 0; step < k / 16; ++step) softmax.weigh(p, step);
        drop(p, first_row, first_key);
    }

  private:
    // The order of a pair's words, which the compiler knows but where a warp has one block of 16 rows.
    template <int rows>
    __device__ static uint32_t selector_of(int first_down, int m) {
        return KeptPairs<false>::selector_of(rows % 32 == 0 ? m : first_down / 16 + m);
    }

    // Where the row stays, or the key, the compiler may take three rounds' multiplications by it out of a loop.
    template <bool transposed>
    __device__ uint4 counter(uint32_t down, uint32_t along) const {
        return {head, transposed ? along : down, offset, transposed ? down : along};
    }
    // Of a call's 16 scores, those that are kept: in the top bits of the bytes.
    __device__ void compare(uint4 &bytes) const {
        bytes = {reaches(bytes.x), reaches(bytes.y), reaches(bytes.z), reaches(bytes.w)};
    }
    // Four comparisons: the low seven bits of each byte by a subtraction that borrows nothing, then the highest.
    __device__ uint32_t reaches(uint32_t bytes) const {
        constexpr uint32_t top = 0x80808080;
        const uint32_t low = (bytes | top) - (dropped & ~top);
        return where_equal(bytes, dropped, low);
    }
};
