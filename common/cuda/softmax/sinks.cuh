// Attention sinks, as gpt-oss has them: one logit a head joins the sum of each row, as if of a key whose V is 0.
#pragma once
#include "launch.cuh"
#include "ptx/sm80.cuh"
#include "softmax/log2.cuh"

// The parameters of a kernel that has them. The sinks are (num_heads) fp32.
template <class Params>
struct Sinking : Params {
    const float *sinks;
    FLASHLADDER_FURTHER_FIELDS(Params, sinks)
};

// That of a head. Without sinks everything stays what it is.
template <bool sinks>
struct Sink {
    float logit;  // in log2

    template <class Params>
    __device__ void take(const Params &params, int head) {
        if constexpr (sinks) logit = params.sinks[head] * log2_e;
    }
    // A row's sum, which counts in 2^m, with it. Where the sink would leave fp32, nothing of O is left.
    __device__ float in_sum(float l, float m) const {
        if constexpr (sinks)
            return l + exp2_approx(fminf(logit - m, 120.0f));
        else
            return l;
    }
    // The part of a row's sum with it that the keys have, given their log-sum-exp in log2. At least 2^-120, so O stays 0.
    __device__ float share(float lse) const { return 1.0f / (1.0f + exp2_approx(fminf(logit - lse, 120.0f))); }
    // A row's log-sum-exp, in log2, with it. Either may be -inf.
    __device__ float in_log(float lse) const {
        if constexpr (sinks)
            return fmaxf(lse, logit) + __log2f(1.0f + exp2_approx(fminf(-fabsf(lse - logit), 0.0f)));  // not NaN if both are
        else
            return lse;
    }
    // The same in natural logarithms.
    __device__ float in_natural_log(float lse) const {
        if constexpr (sinks)
            return in_log(lse * log2_e) * ln_2;
        else
            return lse;
    }
};
