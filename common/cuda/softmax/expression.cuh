// What the text of a mask or a score is printed with (common/expression): where it is evaluated, and its functions. These
// are defined for all numbers, also where C leaves it open.
#pragma once
#include "softmax/ranges.cuh"

#include <math.h>

// An element of S: its sequence, head of Q and positions in the sequence, and the lengths of that. The rows of Q are the
// sequence's last ones, so q is the last key that a causal mask shows the row.
struct Place {
    int b, h, q, k, seqlen_q, seqlen_k;
};

// An element of a tensor, as a type that expressions reckon with.
template <class Value, class T, class Offset>
__device__ inline Value read(const T *tensor, Offset offset) {
    return static_cast<Value>(tensor[offset]);
}

// Another lane's value. A whole warp asks.
template <class T>
__device__ inline T from_lane(T x, int lane) { return static_cast<T>(__shfl_sync(0xffffffff, x, lane)); }

namespace expression {
template <class T>
__device__ inline T min(T a, T b) { return b < a ? b : a; }
template <class T>
__device__ inline T max(T a, T b) { return a < b ? b : a; }
__device__ inline float min(float a, float b) { return fminf(a, b); }
__device__ inline float max(float a, float b) { return fmaxf(a, b); }
__device__ inline float abs(float x) { return fabsf(x); }

// Whole numbers that grow beyond their bits keep the low ones. Without a sign C++ defines that, with one it does not.
__device__ inline unsigned bits(int x) { return x; }
__device__ inline unsigned long long bits(long long x) { return x; }
template <class T>
__device__ inline T sum(T a, T b) { return static_cast<T>(bits(a) + bits(b)); }
template <class T>
__device__ inline T difference(T a, T b) { return static_cast<T>(bits(a) - bits(b)); }
template <class T>
__device__ inline T product(T a, T b) { return static_cast<T>(bits(a) * bits(b)); }
template <class T>
__device__ inline T negative(T x) { return static_cast<T>(-bits(x)); }
template <class T>
__device__ inline T abs(T x) { return x < 0 ? negative(x) : x; }

// Of whole numbers, towards 0; by 0 it gives 0.
template <class T>
__device__ inline T quotient(T a, T b) { return b == 0 ? 0 : b == -1 ? negative(a)
                                                                     : a / b; }
template <class T>
__device__ inline T remainder(T a, T b) { return b == 0 || b == -1 ? 0 : a % b; }
// By as many bits as the low ones of `by` say.
template <class T, class By>
__device__ inline T shifted_left(T x, By by) { return static_cast<T>(bits(x) << (by & (8 * sizeof(T) - 1))); }
template <class T, class By>
__device__ inline T shifted_right(T x, By by) { return x >> (by & (8 * sizeof(T) - 1)); }

// Towards 0: of fp32 the nearest within 32 bits, and 0 of NaN; of whole numbers their low 32 bits.
template <class T>
__device__ inline int to_int(T x) { return static_cast<int>(x); }
__device__ inline int to_int(float x) {
    if (x != x) return 0;
    if (x >= 0x1p31f) return 0x7fffffff;
    return x < -0x1p31f ? -0x7fffffff - 1 : static_cast<int>(x);
}
__device__ inline Range to_int(FloatRange x) { return x.is_known ? Range{to_int(x.low), to_int(x.high)} : ranges::any_number(); }
__device__ inline float to_float(float x) { return x; }

__device__ inline float floor(float x) { return floorf(x); }
__device__ inline float ceil(float x) { return ceilf(x); }
__device__ inline float sqrt(float x) { return sqrtf(x); }
__device__ inline float exp(float x) { return expf(x); }
__device__ inline float exp2(float x) { return exp2f(x); }
__device__ inline float log(float x) { return logf(x); }
__device__ inline float log2(float x) { return log2f(x); }
__device__ inline float tanh(float x) { return tanhf(x); }
__device__ inline float sin(float x) { return sinf(x); }
__device__ inline float cos(float x) { return cosf(x); }
}  // namespace expression
