// A softmax that looks for no maxima: it computes P with the m that it has, and the sums of P tell whether m was too low.
#pragma once
#include "33_rare_rescale/rare_rescale.cuh"

// In fp32, P of a score that has passed m by far is as exact as any. Only as an operand of P V it must be small: fp16 ends
// at 2^16, and equal P above 1 are rounded alike (rare_rescale.cuh). If the sums of a block pass what they are where each P
// is 1, P, O and l are scaled down to a higher m, which P itself gives. If one passes `lost`, the scores are lost, and
// `recompute` computes them once more. A tile that has lost scores looks for each block's maxima from then on.
template <int rows, class Base = DeferredSoftmax<rows>>
struct StaleMaxSoftmax : RarelyRescaled<rows, Base> {
    static constexpr float lost = 0x1p120f;  // what scales P down is at least 2^-126, the smallest that is not taken for 0
    bool looks_for_maxima;                            // for maxima, in this tile

    __device__ void clear() {
        RarelyRescaled<rows, Base>::clear();
        looks_for_maxima = false;
    }

    // Whether some row of the warp has not been shown a score that it sees, so that it has no m yet.
    __device__ bool has_new_rows() const {
        bool is_new = false;
        Base::each_row([&](int b, int h) { is_new |= this->m[b][h] == -FLT_MAX; });
        return __any_sync(0xffffffff, is_new);
    }

    // A block of scores; its maxima are looked for if the caller asks for it.
    template <int cols, class Recompute>
    __device__ void update(Accumulator<rows, cols> &s, Recompute recompute, bool look_for_maxima = false) {
        float sum[rows / 16][2];
        this->raised = false;
        if (looks_for_maxima || look_for_maxima) this->raise_to_maxima(s);
        this->exponentiate(s, sum);
        if (this->any_above(this->raised ? INFINITY : this->template ones<cols>, sum)) {
            if (!this->any_above(lost, sum)) {
                this->scale_down(s, sum);
            } else {
                looks_for_maxima = true;
                recompute();
                this->raise_to_maxima(s);
                this->exponentiate(s, sum);
            }
        }
        this->add(sum);
    }
};
