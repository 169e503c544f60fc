// What is known of an expression in a rectangle of scores (common/expression/ranges.py): of whole numbers the least and the
// largest, of truth values what they may be. It may be less than is true, and never more.
#pragma once

struct Maybe {
    bool may, must;  // be true somewhere; be true everywhere
};

struct Range {
    long long low, high;

    __device__ bool is_one() const { return low == high; }
};

// Of numbers of fp32 what they are at two ends; not known where one of these is NaN.
struct FloatRange {
    float low, high;
    bool is_known;
};

namespace ranges {
constexpr long long most = 1ll << 31;  // in magnitude: products of two have 64 bits
constexpr unsigned most_read = 32;     // elements, where reading them takes less than evaluating what they stand in
__device__ inline Maybe unknown() { return {true, false}; }
__device__ inline Range any_number() { return {-0x7fffffffffffffffll - 1, 0x7fffffffffffffffll}; }

__device__ inline Maybe truth(bool x) { return {x, x}; }  // of C's types `a & b` is a number
__device__ inline Range exactly(int x) { return {x, x}; }
__device__ inline Range exactly(long long x) { return {x, x}; }

// Truth values that numbers are reckoned with.
__device__ inline Range number(Range x) { return x; }
__device__ inline Range number(Maybe x) { return {x.must, x.may}; }

__device__ inline bool is_small(Range x) { return x.low >= -most && x.high <= most; }
// Where a number of so many bits may have grown beyond them, it may be any.
template <int bits>
__device__ inline Range within(long long low, long long high) {
    return bits == 64 || (low >= -most && high < most) ? Range{low, high} : any_number();
}
template <class A, class B, class Of>
__device__ inline Range reckon(A a, B b, Of of) {
    const Range x = number(a), y = number(b);
    return is_small(x) && is_small(y) ? of(x, y) : any_number();
}
template <int bits, class A, class B>
__device__ inline Range sum(A a, B b) {
    return reckon(a, b, [](Range x, Range y) { return within<bits>(x.low + y.low, x.high + y.high); });
}
template <int bits, class A, class B>
__device__ inline Range difference(A a, B b) {
    return reckon(a, b, [](Range x, Range y) { return within<bits>(x.low - y.high, x.high - y.low); });
}
template <int bits, class A, class B>
__device__ inline Range product(A a, B b) {
    return reckon(a, b, [](Range x, Range y) {
        const long long ends[] = {x.low * y.low, x.low * y.high, x.high * y.low, x.high * y.high};
        long long low = ends[0], high = ends[0];
        for (long long end : ends) low = end < low ? end : low, high = end > high ? end : high;
        return within<bits>(low, high);
    });
}
// By one number above 0, towards 0.
template <int bits, class A, class B>
__device__ inline Range quotient(A a, B b) {
    return reckon(a, b, [](Range x, Range y) {
        if (!y.is_one() || y.low <= 0 || y.low == most) return any_number();
        const int by = y.low;
        return within<bits>(x.low / by, x.high / by);
    });
}
template <int bits, class A, class B>
__device__ inline Range remainder(A a, B b) {
    return reckon(a, b, [](Range x, Range y) {
        if (!y.is_one() || y.low <= 0 || y.low == most) return any_number();
        const int by = y.low;
        if (x.low < 0) return Range{1 - by, by - 1};
        return x.low / by == x.high / by ? Range{x.low % by, x.high % by} : Range{0, by - 1};
    });
}
template <class A, class B>
__device__ inline Range min(A a, B b) {
    const Range x = number(a), y = number(b);
    return {x.low < y.low ? x.low : y.low, x.high < y.high ? x.high : y.high};
}
template <class A, class B>
__device__ inline Range max(A a, B b) {
    const Range x = number(a), y = number(b);
    return {x.low > y.low ? x.low : y.low, x.high > y.high ? x.high : y.high};
}
template <int bits, class A>
__device__ inline Range abs(A a) {
    const Range x = number(a);
    if (x.low >= 0) return x;
    if (!is_small(x)) return any_number();
    return within<bits>(x.high > 0 ? 0 : -x.high, -x.low > x.high ? -x.low : x.high);
}

template <class A, class B>
__device__ inline Maybe at_most(A a, B b) {
    const Range x = number(a), y = number(b);
    return {x.low <= y.high, x.high <= y.low};
}
template <class A, class B>
__device__ inline Maybe below(A a, B b) {
    const Range x = number(a), y = number(b);
    return {x.low < y.high, x.high < y.low};
}
template <class A, class B>
__device__ inline Maybe equal(A a, B b) {
    const Range x = number(a), y = number(b);
    return {x.low <= y.high && y.low <= x.high, x.is_one() && y.is_one() && x.low == y.low};
}

__device__ inline FloatRange alike(float x) { return {x, x, true}; }
template <class Place, class Of>
__device__ inline FloatRange ends(Place first, Place last, Of of) {
    const float a = of(first), b = of(last);
    return {a < b ? a : b, a < b ? b : a, a == a && b == b};
}
template <class Place, class Of>
__device__ inline FloatRange ends_of_q(Place at, Range q, Of of) {
    Place last = at;
    at.q = q.low, last.q = q.high;
    return ends(at, last, of);
}
template <class Place, class Of>
__device__ inline FloatRange ends_of_k(Place at, Range k, Of of) {
    Place last = at;
    at.k = k.low, last.k = k.high;
    return ends(at, last, of);
}
__device__ inline Maybe at_most(FloatRange x, FloatRange y) {
    return x.is_known && y.is_known ? Maybe{x.low <= y.high, x.high <= y.low} : unknown();
}
__device__ inline Maybe below(FloatRange x, FloatRange y) {
    return x.is_known && y.is_known ? Maybe{x.low < y.high, x.high < y.low} : unknown();
}
__device__ inline Maybe equal(FloatRange x, FloatRange y) {
    if (!x.is_known || !y.is_known) return unknown();
    return {x.low <= y.high && y.low <= x.high, x.low == x.high && y.low == y.high && x.low == y.low};
}

__device__ inline Maybe inverse(Maybe x) { return {!x.must, !x.may}; }
// The second one only where all evaluate it, or where it is `always` known, as it reads nothing.
template <class Second>
__device__ inline Maybe both(Maybe x, Second second, bool always) {
    if (!x.may || (!x.must && !always)) return {x.may, false};
    const Maybe y = second();
    return {y.may, x.must && y.must};
}
template <class Second>
__device__ inline Maybe either(Maybe x, Second second, bool always) {
    if (x.must || (x.may && !always)) return {true, x.must};
    const Maybe y = second();
    return {x.may || y.may, y.must};
}
template <class Yes, class No, class Result>
__device__ inline Result chosen(Maybe x, Yes yes, No no, Result unsure) {
    return x.must ? yes() : !x.may ? no()
                                   : unsure;
}

// Of elements, by the least and the largest one.
__device__ inline Maybe between(bool low, bool high) { return {high, low}; }
__device__ inline Range between(int low, int high) { return {low, high}; }
__device__ inline Range between(long long low, long long high) { return {low, high}; }

// Numbers whose least and largest one may be none that is reached: something, if they are one.
__device__ inline Range if_one(Range x) { return x.is_one() ? x : any_number(); }

template <class Visit>
__device__ inline void each_place(Visit visit) { visit(); }
template <class Visit, class... More>
__device__ inline void each_place(Visit visit, Range index, More... more) {
    for (long long i = index.low; i <= index.high; ++i) each_place([&](auto... others) { visit(i, others...); }, more...);
}
// The elements that `read` reads at all of these indices; `unsure` where they are many.
template <class Known, class Read, class... Indices>
__device__ inline Known elements(Known unsure, Read read, Indices... indices) {
    auto count = [](Range x) {
        const unsigned long long more = static_cast<unsigned long long>(x.high) - static_cast<unsigned long long>(x.low);
        return more < most_read ? static_cast<unsigned>(more) + 1 : most_read + 1;
    };
    if ((1u * ... * count(indices)) > most_read) return unsure;
    auto low = read(indices.low...), high = low;
    each_place(
        [&](auto... at) {
            const auto one = read(at...);
            low = one < low ? one : low;
            high = one > high ? one : high;
        },
        indices...);
    return between(low, high);
}
}  // namespace ranges
