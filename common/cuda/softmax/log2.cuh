// Scores and m are kept in log2, as the exponential unit works.
#pragma once

constexpr float log2_e = 1.4426950408889634f;
constexpr float ln_2 = 0.6931471805599453f;

// A row's log-sum-exp; or, where it sees no key, what its ladder writes for that.
__device__ inline float or_of_no_key(float lse, float of_no_key) { return lse == -INFINITY ? of_no_key : lse; }
