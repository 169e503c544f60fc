// A softmax that looks for no maxima: it computes P with the m that it has, and the sums of P tell whether m was too low.
#pragma once
#include "rare_rescale.cuh"

// In fp32, P of a score that has passed m by far is as exact as any. Only as an operand of P V it must be at most `most`,
// which fp16 holds. A lane's sum of a row bounds its P. If the sum of a block passes `most`, P, O and l are brought down
// to a higher m, which P itself gives. If it passes `lost`, the scores are lost, and `scores_again` computes them once
// more. A tile that has lost scores looks for each block's maxima from then on.
template <int rows>
struct TrustingSoftmax : RarelyRescaled<rows> {
    static constexpr float most = 0x1p10f;
    static constexpr float lost = 0x1p120f;  // what brings P down is at least 2^-126, the smallest that is not taken for 0
    static constexpr float by = 4.0f;  // in log2: sums of blocks whose maxima were looked for stay below `most`
    bool looks;                        // for maxima, in this tile

    __device__ void clear() {
        RarelyRescaled<rows>::clear();
        looks = false;
    }

    // A block of scores, after each row has been shown one that it sees.
    template <int cols, class Again>
    __device__ void trust(Accumulator<rows, cols> &s, Again scores_again) {
        float sum[rows / 16][2];
        this->raised = false;
        if (looks) this->follow_maxima(s, by);
        this->exponentiate(s, sum);
        if (!all_at_most(most, sum)) {
            if (all_at_most(lost, sum)) {
                bring_down(s, sum);
            } else {
                looks = true;
                scores_again();
                this->follow_maxima(s, by);
                this->exponentiate(s, sum);
            }
        }
        this->add(sum);
    }

  private:
    __device__ bool all_at_most(float limit, const float (&sum)[rows / 16][2]) {
        bool within = true;
        this->each_row([&](int b, int h) { within &= sum[b][h] <= limit; });
        return __all_sync(0xffffffff, within);
    }

    // Raises m by the block's largest P of each row, and brings down what was computed with the old m.
    template <int cols>
    __device__ void bring_down(Accumulator<rows, cols> &s, float (&sum)[rows / 16][2]) {
        this->raised = true;
        this->each_row([&](int b, int h) {
            this->raise_to(b, h, this->m[b][h] + fmaxf(__log2f(quad_max(this->lane_max(s, b, h))), 0.0f));
            this->scale_row(s, b, h, this->factor[b][h]);
            sum[b][h] *= this->factor[b][h];
        });
    }
};
