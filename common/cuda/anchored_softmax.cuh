// An online softmax that looks for no maximum while it need not.
#pragma once
#include <type_traits>

#include "lazy_softmax.cuh"

// Whether T has the exponents of fp32, as bf16 has. Then scores may pass their anchor by far. fp16 ends at 2^16.
template <class T>
constexpr bool is_wide = false;
template <>
constexpr bool is_wide<__nv_bfloat16> = true;

// In shared memory: whether a warp has lost a row. A warp tells of block j when it has finished it. After the barrier
// of block j - 1 all warps know. A quick warp may by then tell of block j - 1, so even and odd blocks have a word each.
struct Loss {
    int of_block[2];

    // Before the first barrier.
    __device__ void clear() {
        if (threadIdx.x < 2) of_block[threadIdx.x] = 0;
    }
    __device__ void tell(int block) { atomicOr(&of_block[block % 2], 1); }
    __device__ bool known(int block) const { return of_block[block % 2] != 0; }
};

// Softmax needs some m that keeps 2^(S - m) within range, not the maximum: an anchor. Where T is wide, blocks after the
// first may be taken without a look at their scores. After such a block, `settle` looks at the sums, and moves the
// anchor of a row whose sum has grown large. A row that has jumped too far is lost. Its P may have left the range, and
// what came before has no weight beside it. Then the CTA begins anew with the block of the jump. From there on it looks
// for the maxima (`update`).
template <class T, int rows>
struct AnchoredSoftmax : LazySoftmax<T, rows> {
    static constexpr float large = 0x1p16f;  // a sum that reaches this moves the anchor
    static constexpr float far = 0x1p42f;    // and here its row is lost: sums below `large` weigh below 2^-26 beside it

    float block_l[rows / 16][2];  // the sums of the block at hand, apart from l as in `exponentiate_apart`

    // Turns one part of a chunk of S into an operand of P V: number `part` of `parts`. Chunk `chunk` has the 16 columns
    // from 16 * chunk on.
    template <int cols>
    __device__ void add_part(const Accumulator<rows, cols> &s, HeldA<rows, cols> &p, int chunk, int part, int parts) {
        constexpr int pairs = rows / 4;  // of a lane's elements in a chunk
#pragma unroll
        for (int pair = part * pairs / parts; pair < (part + 1) * pairs / parts; ++pair) {
            const int b = pair / 4, i = pair % 4, h = i % 2;
            const float(&block)[4] = s.block[b][chunk * 2 + i / 2];
            const float left = exp2_approx(block[2 * h] * this->unit - this->m[b][h]);
            const float right = exp2_approx(block[2 * h + 1] * this->unit - this->m[b][h]);
            block_l[b][h] = chunk == 0 && i / 2 == 0 ? left + right : block_l[b][h] + (left + right);
            if (chunk == cols / 16 - 1 && i / 2 == 1) this->l[b][h] += block_l[b][h];
            p.block[chunk][b][i] = pack<T>(left, right);
        }
    }
    // A whole block, in place.
    template <int cols>
    __device__ void add(Accumulator<rows, cols> &s) {
        this->exponentiate_apart(s);
    }

    // To be called after the P V of a block. If a sum has grown large, it moves the anchors of the warp's rows, and
    // calls `loss` if a row is lost. `stop` says whether a row was lost in the block before (see Loss). Returns `stop`,
    // as one value for the whole warp.
    template <int head_dim, class Loss>
    __device__ bool settle(Accumulator<rows, head_dim> &o, bool stop, Loss loss) {
        int largest = 0;  // the bits of a float, which positive floats are ordered by
        this->each_row([&](int b, int h) { largest = max(largest, __float_as_int(this->l[b][h])); });
        if (!__any_sync(0xffffffff, stop || largest >= __float_as_int(large))) return false;
        bool lost = false;
        this->each_row([&](int b, int h) {
            const float sum = quad_max(this->l[b][h]);
            const float up = sum < far ? fmaxf(__log2f(sum), 0.0f) : 0.0f;
            this->raise(this->m[b][h] + up, o, b, h);
            this->template each_element<head_dim>(o, b, h, [&](float x) { lost |= !(fabsf(x) < INFINITY); });
            lost |= !(sum < far);
        });
        if (lost) loss();
        return __any_sync(0xffffffff, stop);
    }

    // Whether all rows of the lane have been lost to a jump.
    __device__ bool all_lost() const {
        bool all = true;
        this->each_row([&](int b, int h) { all &= quad_max(this->l[b][h]) >= far; });
        return all;
    }
};

// Calls attend(j, whether the block is anchored) for the blocks from `from` down to 0. Blocks are anchored from
// `first_anchored` down, if T is wide and the CTA has not begun anew. Returns the block to begin anew with, or -1 if
// there is none. This is the block of the jump if every row has been lost; else `last`, as rows that have not been lost
// would lose what they have.
template <class T, class Softmax, class Attend>
__device__ inline int attend_down(int from, int first_anchored, bool anew, int last, const Softmax &softmax,
                                  const Loss &loss, Attend attend) {
    const bool anchors = is_wide<T> && !anew;
    int j = from;
    for (; j > (anchors ? first_anchored : -1); --j) attend(j, std::false_type{});
    if constexpr (is_wide<T>) {
        if (!anchors) return -1;
        bool stop = false;
        for (; j >= 0 && !stop; --j) stop = attend(j, std::true_type{});
        cp_async_wait<0>();
        __syncthreads();  // every warp has told of its last block, and no copy is under way
        if (!__any_sync(0xffffffff, loss.known(0) || loss.known(1))) return -1;
        return any_of_cta(!softmax.all_lost()) ? last : j + 1 + stop;
    }
    return -1;
}

// Calls attend_all(from, anew), which returns what attend_down returns: first from block `last` on, and then as long as
// there is a block to begin anew with.
template <class AttendAll>
__device__ inline void attend_and_again(int last, AttendAll attend_all) {
    int from = last;
    bool anew = false;
    do {
        from = attend_all(from, anew);
        anew = true;
    } while (from >= 0);
}
