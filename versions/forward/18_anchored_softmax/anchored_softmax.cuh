// An online softmax that looks for no maximum while it need not.
#pragma once
#include <type_traits>

#include "17_lazy_rescale/lazy_softmax.cuh"

// Whether T has the exponents of fp32, as bf16 has. Then scores may pass their anchor by far. fp16 ends at 2^16.
template <class T>
constexpr bool is_wide = false;
template <>
constexpr bool is_wide<__nv_bfloat16> = true;

// In shared memory: what the warps have lost. A warp tells of block j when it has finished it. After the barrier of
// block j - 1 all warps know. A quick warp may by then tell of block j - 1, so even and odd blocks have a word each.
struct Loss {
    // What may be lost: a row's sum up to its jump, which has no weight beside what the row jumped to; or more.
    static constexpr int sum = 1, more = 2;
    int of_block[2];

    // Before the first barrier.
    __device__ void clear() {
        if (threadIdx.x < 2) of_block[threadIdx.x] = 0;
    }
    __device__ void tell(int block, int what) { atomicOr(&of_block[block % 2], what); }
    __device__ bool known(int block) const { return of_block[block % 2] != 0; }
    __device__ int all() const { return of_block[0] | of_block[1]; }
};

// A way through the blocks from `from` down to 0. All passes but the first begin anew. Then rows that have lost nothing
// sleep until block `until` is done, as they had these blocks before; if it is negative, all rows begin anew.
struct Pass {
    static constexpr int anchored = 3;  // so many may be anchored: who loses rows all the time looks for the maxima
    int from;
    int until;
    int number;
};

// Softmax needs some m that keeps 2^(S - m) within range, not the maximum: an anchor. Where T is wide, blocks after the
// first may be taken without a look at their scores. After such a block, `settle` looks at the sums, and moves the
// anchor of a row whose sum has grown large. If a row has jumped so far that it left the range, it is lost. What came
// before its jump has no weight. Then the CTA begins anew with the block of the jump, and looks for the maxima
// (`update`) there. Rows that are not lost sleep until they are asked for new blocks.
template <class T, int rows>
struct AnchoredSoftmax : LazySoftmax<T, rows> {
    static constexpr float large = 0x1p16f;  // a sum that reaches this moves the anchor
    static constexpr float far = 0x1p42f;    // and beside this one, those below `large` weigh below 2^-26
    static constexpr float most = 120.0f;    // by which an anchor moves, in log2: 2^-126 is the smallest factor
    static constexpr float asleep = 0x1p126f;  // the m of a row that sleeps: whatever it is shown weighs 0

    float waking_m[rows / 16][2];  // of a row that sleeps

    // Before a pass that begins anew: clears the rows that are to begin anew, and puts the others to sleep. (A branch
    // for the two kinds of passes would cost registers in all of the loop.)
    template <int head_dim>
    __device__ void begin_anew(Accumulator<rows, head_dim> &o, const Pass &pass) {
        const bool all = pass.until < 0;
        this->each_row([&](int b, int h) {
            const bool begins = all || this->row_w(b, h) == INFINITY;
            waking_m[b][h] = this->m[b][h];
            this->m[b][h] = begins ? -FLT_MAX : asleep;
            this->l[b][h] = begins ? 0.0f : this->l[b][h];
            this->older_l[b][h] = begins ? 0.0f : this->older_l[b][h];
            this->template each_element<head_dim>(o, b, h, [&](float &x) { x = begins ? 0.0f : x; });
        });
        if (all || this->w == INFINITY) this->w = 0.0f;
    }

    // Turns a block of scores S into P with the m that it has.
    template <int cols>
    __device__ void add(Accumulator<rows, cols> &s) {
        this->exponentiate(s, this->l);
    }

    // To be called after the P V of block j. If a sum has grown large, it moves the anchors of the warp's rows, and tells
    // `loss` of those that are lost. Anchors move by whole numbers: P of equal scores are then rounded alike, before and
    // after. `stop` says whether a row was lost in the block before (see Loss). Returns `stop`, as one value for the whole
    // warp.
    template <int head_dim>
    __device__ bool settle(Accumulator<rows, head_dim> &o, int j, bool stop, Loss &loss) {
        const bool new_group = j % this->group == 0;
        if (!__any_sync(0xffffffff, stop || new_group || this->w >= large)) return false;
        this->begin_group(j);
        if (__any_sync(0xffffffff, this->w >= large)) move_anchors(o, j, loss);
        return __any_sync(0xffffffff, stop);
    }

    // The rows that sleep are asked for new blocks.
    __device__ void wake() {
        this->each_row([&](int b, int h) {
            if (this->m[b][h] == asleep) this->m[b][h] = waking_m[b][h];
        });
    }

  private:
    template <int head_dim>
    __device__ void move_anchors(Accumulator<rows, head_dim> &o, int j, Loss &loss) {
        int lost = 0;
        this->each_row([&](int b, int h) {
            const float sum = this->row_w(b, h);
            bool is_lost = sum == INFINITY;  // where V is small or P is dropped, O may have no infinity
            this->template each_element<head_dim>(o, b, h, [&](float x) { is_lost |= !(fabsf(x) < INFINITY); });
            is_lost = quad_max(is_lost) > 0.0f && sum <= INFINITY;  // NaN comes from Q or K, and stays
            const float up = is_lost ? 0.0f : fminf(fmaxf(floorf(__log2f(sum)), 0.0f), most);
            this->raise(this->m[b][h] + up, o, b, h);
            if (is_lost) {
                lost |= sum < far ? Loss::more : Loss::sum;
                if (this->keeps(b, h)) this->w = INFINITY;
            }
        });
        if (lost) loss.tell(j, lost);
    }
};

// Calls attend(j, whether the block is anchored) for the blocks of a pass. In the first pass blocks are anchored from
// `first_anchored` down, if T is wide; in a later one when no row sleeps any more. Returns the next pass; it has no blocks
// if there is none. It begins with the block in which a row was lost, or with block `last` if more was lost than what
// came before a jump. Blocks before block `lowest` are left to the caller.
template <class T, class Softmax, class Attend, class Lowest = Zero>
__device__ inline Pass attend_down(const Pass &pass, int first_anchored, int last, Softmax &softmax, Loss &loss,
                                   Attend attend, Lowest lowest = {}) {
    constexpr Pass none{-1, -1, Pass::anchored};
    const bool anchors = is_wide<T> && pass.number < Pass::anchored;
    const int anchored = !anchors ? lowest - 1 : (pass.number == 0 ? first_anchored : pass.until - 1);
    int j = pass.from;
    for (; j > anchored; --j) {
        attend(j, std::false_type{});
        if (is_wide<T> && j == pass.until) softmax.wake();
    }
    if constexpr (is_wide<T>) {
        if (!anchors) return none;
        bool stop = false;
        for (; j >= lowest && !stop; --j) stop = attend(j, std::true_type{});
        cp_async_wait<0>();
        __syncthreads();  // every warp has told of its last block, and no copy is under way
        const int lost = loss.all();
        if (!__any_sync(0xffffffff, lost != 0)) return none;
        __syncthreads();  // every warp knows
        loss.clear();
        if (__any_sync(0xffffffff, lost & Loss::more)) return {last, -1, Pass::anchored};
        return {j + 1 + stop, j + 1, pass.number + 1};
    }
    return none;
}

// Calls attend_all(pass), which returns what attend_down returns: from block `last` on, and then as long as a pass has
// blocks.
template <class Softmax, int rows, int head_dim, class AttendAll>
__device__ inline void attend_passes(int last, Softmax &softmax, Accumulator<rows, head_dim> &o, AttendAll attend_all) {
    Pass pass{last, -1, 0};
    softmax.clear(o);
    while (true) {
        pass = attend_all(pass);
        if (pass.from < 0) return;
        softmax.begin_anew(o, pass);
    }
}
