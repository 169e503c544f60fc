// Scores and m are kept in log2, as the exponential unit works.
#pragma once

constexpr float log2_e = 1.4426950408889634f;
constexpr float ln_2 = 0.6931471805599453f;
