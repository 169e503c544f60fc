// A softmax with a stale maximum whose end needs little of O: sums and log-sum-exp come while the last P V still sums into it.
#pragma once
#include "37_no_maxima/stale_max_softmax.cuh"
#include "ptx/sm90.cuh"

template <int rows, class Base = DeferredSoftmax<rows>>
struct EarlyFinalize : StaleMaxSoftmax<rows, Base> {
    float reciprocal[rows / 16][2];
    bool sees_none;  // some row of this warp

    // The sums of whole rows, and 1 / l: no branch, as products are under way. Newton's step makes an approximation as
    // good as a division for these l, which are not near an end of fp32's range. Of a row that sees no key l is 0.
    __device__ void finalize() {
        bool none = false;
        this->each_row([&](int b, int h) {
            const float l = this->l[b][h] = quad_sum(this->l[b][h]);
            const float near = reciprocal_approx(l);
            reciprocal[b][h] = fmaf(near, -fmaf(l, near, -1.0f), near);
            none |= l == 0.0f;
        });
        sees_none = __any_sync(0xffffffff, none);
    }

    // Always true, as is_summed; it is told from l and 1 / l of each row.
    __device__ bool is_finalized() const {
        bool ended = true;
        this->each_row([&](int b, int h) { ended &= !(this->l[b][h] < 0.0f && reciprocal[b][h] < 0.0f); });
        return ended;
    }

    // As store_lse, but no branch either.
    __device__ void store_lse_if(bool wanted, float *lse, int end) const {
        this->each_row([&](int b, int h) {
            const int row = b * 16 + h * 8 + accumulator_row();
            const float value = (this->m[b][h] + __log2f(this->l[b][h])) * ln_2;
            store_global_4_if(wanted && lane_index() % 4 == 0 && row < end, lse + row, value);
        });
    }

    // O /= l; of a row that sees no key, O = 0, whatever is in V.
    template <int head_dim>
    __device__ void normalize(Accumulator<rows, head_dim> &o) {
        normalize_unless(o, [&](int b, int h) { return this->l[b][h] == 0.0f; });
    }

  protected:
    template <int head_dim, class SeesNone>
    __device__ void normalize_unless(Accumulator<rows, head_dim> &o, SeesNone row_sees_none) {
        if (sees_none)
            this->each_row([&](int b, int h) {
                if (!row_sees_none(b, h)) return;
                reciprocal[b][h] = 0.0f;
                this->template each_element<head_dim>(o, b, h, [&](float &x) { x = 0.0f; });
            });
        this->each_row([&](int b, int h) { this->scale_row(o, b, h, reciprocal[b][h]); });
    }
};
