// Dropout: which weights count, from the places of their scores alone, so that forward and backward pass agree whatever
// their tiles are. common/problem/dropout.py is the same in Python.
#pragma once
#include "launch.cuh"
#include "tile/fragment.cuh"

// The parameters of a kernel that has it.
template <class Params>
struct Dropping : Params {
    const int *rng_state;  // two words of seed, one of offset
    int dropped;           // bytes below it are those of weights that are dropped: of 256 as many
    FLASHLADDER_FURTHER_FIELDS(Params, rng_state, dropped)
};

// Philox 4x32 (Salmon et al., SC 2011), of 7 rounds: the fewest that pass BigCrush, and each costs four multiplications.
__device__ inline uint4 philox(uint4 counter, uint2 key) {
#pragma unroll
    for (int round = 0; round < 7; ++round) {
        constexpr uint32_t first = 0xD2511F53, second = 0xCD9E8D57;
        counter = {__umulhi(second, counter.z) ^ counter.y ^ key.x, second * counter.z,
                   __umulhi(first, counter.x) ^ counter.w ^ key.y, first * counter.x};
        key.x += 0x9E3779B9, key.y += 0xBB67AE85;
    }
    return counter;
}

// The weights of one head. A call of the generator has 16 bytes: byte i of word j is of the score (row + 8 i, key + 8 j)
// of a square of 32 by 32. A lane has all 16 of these in an accumulator, of S or of S^T.
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

    // Visits the pairs of an operand, P or with `transposed` P^T, whose scores begin at a row and a key: visit(step, m, i,
    // mask), where the mask has the bits of what is kept of block[step][m][i].
    template <bool transposed, int rows, int k, class Visit>
    __device__ void each_pair(int first_row, int first_key, Visit visit) const {
        static_assert((rows == 16 || rows % 32 == 0) && (k == 16 || k % 32 == 0), "tiles do not cross squares");
        constexpr int high = rows < 32 ? rows : 32, wide = k < 32 ? k : 32;  // of the operand in a square
#pragma unroll
        for (int down = 0; down < rows; down += high)
#pragma unroll
            for (int along = 0; along < k; along += wide) {
                const int row = first_row + (transposed ? along : down), key = first_key + (transposed ? down : along);
                uint4 kept[2];
#pragma unroll
                for (int of_pair = 0; of_pair < 2; ++of_pair) {
                    const int lane_down = accumulator_row(), lane_along = accumulator_col() + of_pair;
                    kept[of_pair] = kept_of(row / 32 * 8 + (transposed ? lane_along : lane_down),
                                            key / 32 * 8 + (transposed ? lane_down : lane_along));
                }
                const int byte = row / 8 % 4, word = key / 8 % 4;
#pragma unroll
                for (int block = 0; block < high * wide / 64; ++block) {
                    const int m = block / (wide / 8), n = block % (wide / 8);  // of 8 x 8
                    const int right = word + (transposed ? m : n), below = byte + (transposed ? n : m);
                    const uint32_t mask = __byte_perm(at(kept[0], right), at(kept[1], right), 0x4400 + 0x1111 * below);
                    visit((along + n * 8) / 16, (down + m * 8) / 16, m % 2 + n % 2 * 2, mask);
                }
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
    // 16 bytes, each 0xff or 0.
    __device__ uint4 kept_of(uint32_t row, uint32_t key) const {
        const uint4 random = philox({row, key, head, offset}, seed);
        return {reaches(random.x), reaches(random.y), reaches(random.z), reaches(random.w)};
    }
    // Four comparisons: the low seven bits of each byte by a subtraction that borrows nothing, then the highest.
    __device__ uint32_t reaches(uint32_t bytes) const {
        constexpr uint32_t top = 0x80808080;
        const uint32_t low = (bytes | top) - (dropped & ~top);
        const uint32_t is_kept = ((bytes & ~dropped) | (~(bytes ^ dropped) & low)) & top;
        return (is_kept >> 7) * 0xff;
    }
    __device__ static uint32_t at(const uint4 &words, int word) {
        return word < 2 ? (word == 0 ? words.x : words.y) : (word == 2 ? words.z : words.w);
    }
};
