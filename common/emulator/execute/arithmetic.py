"""Functions that the generated code calls: PTX arithmetic that numpy has no operator for, on broadcasting arrays.

Names of types are numpy's: u4 is an array of uint32. bf16 values are held as their upper 16 bits (u2).
"""

import math
from fractions import Fraction

import numpy as np

__all__ = [
    "bf16_pack",
    "bf16_round",
    "bf16_widen",
    "bit_extract_s",
    "bit_extract_u",
    "bit_find",
    "bit_insert",
    "bit_reverse",
    "clamp_int",
    "divide_approximately",
    "divide_int",
    "f16_round",
    "float_to_int",
    "flush",
    "fma_directed",
    "fma_f32",
    "fma_f64",
    "fma_odd",
    "funnel",
    "halves_of",
    "join_halves",
    "leading_zeros",
    "lop3",
    "max_nan",
    "max_number",
    "min_nan",
    "min_number",
    "mul_hi",
    "mul_wide",
    "permute_bytes",
    "remainder_int",
    "round_directed",
    "round_to",
    "saturate",
    "shift_left",
    "shift_right",
]

_SMALLEST_NORMAL = np.float32(2.0**-126)
_HUGE_DIVISOR = np.float32(2.0**126)
_BELOW_TIES = np.uint64((1 << 28) - 1)
_CANONICAL_NAN = np.uint32(0x7FFFFFFF).view(np.float32)


# -- floats


def flush(x: np.ndarray) -> np.ndarray:
    """.ftz: subnormal f4 become zero of the same sign."""
    return x * (np.abs(x) >= _SMALLEST_NORMAL)


def saturate(x: np.ndarray) -> np.ndarray:
    """.sat: clamps to [0, 1]; NaN and -0 become 0."""
    return np.where(x > 0, np.fmin(x, x.dtype.type(1)), x.dtype.type(0))


def min_number(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """min: -0 is less than +0, and a number wins over NaN."""
    return _with_signed_zeros(np.fmin(a, b), a, b, np.bitwise_or)


def max_number(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """max: +0 is more than -0, and a number wins over NaN."""
    return _with_signed_zeros(np.fmax(a, b), a, b, np.bitwise_and)


def min_nan(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """min.NaN: the canonical NaN if either is NaN."""
    return _with_canonical_nan(_with_signed_zeros(np.minimum(a, b), a, b, np.bitwise_or))


def max_nan(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """max.NaN. With b = 0 it is .relu, which CUDA's cuda_fp16.hpp gives in these terms (__hfma_relu)."""
    return _with_canonical_nan(_with_signed_zeros(np.maximum(a, b), a, b, np.bitwise_and))


def _with_signed_zeros(result: np.ndarray, a: np.ndarray, b: np.ndarray, combine: np.ufunc) -> np.ndarray:
    """Of two zeros, the one whose sign bit is that of both combined; numpy leaves open which zero it takes."""
    if result.all():
        return result
    bits = f"u{result.itemsize}"
    return np.where((a == 0) & (b == 0), combine(a.view(bits), b.view(bits)).view(result.dtype), result)


def _with_canonical_nan(x: np.ndarray) -> np.ndarray:
    nan = np.isnan(x)
    return np.where(nan, _CANONICAL_NAN, x) if nan.any() else x


def divide_approximately(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """div.approx: a * (1 / b), in which 1 / b is taken for zero where |b| lies between 2**126 and infinity."""
    huge = (np.abs(b) > _HUGE_DIVISOR) & np.isfinite(b)
    quotient = a / b
    return np.where(huge, a * np.copysign(np.float32(0), b), quotient) if huge.any() else quotient


def fma_f32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c rounded once to f4."""
    wide = np.float64
    total = a.astype(wide) * b.astype(wide) + c.astype(wide)
    # Only a sum that lies on a tie of f4, where at least its 28 last bits are zero, may have been rounded to it.
    if (total.view(np.uint64) & _BELOW_TIES).all():
        return total.astype(np.float32)
    return _fma_wide(a, b, c).astype(np.float32)


def fma_odd(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of halves, as f4 rounded to odd: to round that to a half is to round the exact sum."""
    wide = _fma_wide(a, b, c)
    short = round_directed(wide, "rz")
    return (short.view(np.uint32) | (short != wide)).view(np.float32)


def _fma_wide(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of f4, as f8 rounded to odd: an inexact result has its last bit set and so is no tie of a shorter type
    (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008)."""
    total, error = _sum_and_error(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))
    is_even = (total.view(np.uint64) & np.uint64(1)) == 0
    up, down = is_even & (error > 0), is_even & (error < 0)
    return np.where(up, np.nextafter(total, np.inf), np.where(down, np.nextafter(total, -np.inf), total))


def _sum_and_error(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The f8 sum and what it lost (Knuth's TwoSum)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def fma_f64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c rounded once to f8, one element after the other."""
    return np.asarray(np.frompyfunc(_fma_exact, 3, 1)(a, b, c), np.float64)


def _fma_exact(a: float, b: float, c: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b) and a and b):
        return a * b + c
    if not math.isfinite(c):
        return c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def fma_directed(a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: str) -> np.ndarray:
    """a * b + c rounded to f4 towards zero (rz), down (rm) or up (rp); the product of f4 is exact in f8."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total, error = _sum_and_error(product, c)
    if mode == "rm":  # a sum of opposites is -0
        total = np.where((total == 0) & (np.signbit(product) != np.signbit(c)), -0.0, total)
    return _directed(total, error, mode)


def round_directed(x: np.ndarray, mode: str) -> np.ndarray:
    """f8 rounded to f4 by rz, rm or rp."""
    return _directed(x, np.zeros_like(x), mode)


def _directed(x: np.ndarray, error: np.ndarray, mode: str) -> np.ndarray:
    """x + error (f8) rounded to f4."""
    nearest = x.astype(np.float32)
    above = (nearest > x) | ((nearest == x) & (error < 0))
    below = (nearest < x) | ((nearest == x) & (error > 0))
    down, up = above & (mode == "rm"), below & (mode == "rp")
    if mode == "rz":
        down, up = above & (nearest > 0), below & (nearest < 0)
    infinity = np.float32(np.inf)
    return np.where(down, np.nextafter(nearest, -infinity), np.where(up, np.nextafter(nearest, infinity), nearest))


def f16_round(x: np.ndarray) -> np.ndarray:
    """A number to f16 (u2), round to nearest even; NaN becomes 0x7fff."""
    rounded = x.astype(np.float16).view(np.uint16)
    nan = np.isnan(x)
    return np.where(nan, np.uint16(0x7FFF), rounded) if nan.any() else rounded


def bf16_round(x: np.ndarray) -> np.ndarray:
    """f4 to bf16 (u2), round to nearest even; NaN becomes 0x7fff."""
    return (_bf16_rounded(x) >> np.uint32(16)).astype(np.uint16)


def bf16_pack(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Two f4 rounded to bf16 and packed into one u4."""
    high, low = _bf16_rounded(high), _bf16_rounded(low)
    return (high & np.uint32(0xFFFF0000)) | (low >> np.uint32(16))


def _bf16_rounded(x: np.ndarray) -> np.ndarray:
    """The bits of f4 whose upper half is the bf16 nearest to it."""
    bits = x.view(np.uint32)
    rounded = bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))
    nan = np.isnan(x)
    return np.where(nan, np.uint32(0x7FFF0000), rounded) if nan.any() else rounded


def bf16_widen(x: np.ndarray) -> np.ndarray:
    """bf16 (u2) to f4, exact."""
    return (x.astype(np.uint32) << 16).view(np.float32)


_ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def round_to(x: np.ndarray, mode: str) -> np.ndarray:
    """A float rounded to an integral float by .rni, .rzi, .rmi or .rpi."""
    return _ROUNDINGS[mode](x)


def float_to_int(x: np.ndarray, mode: str, dtype: np.dtype) -> np.ndarray:
    """cvt from float to integer: rounds and clamps to the range. NaN becomes 0, but where f64 or 64 bits take part the
    integer with only its top bit set."""
    info = np.iinfo(dtype)
    nan = np.isnan(x)
    rounded = _ROUNDINGS[mode](np.where(nan, 0.0, x.astype(np.float64)))
    inside = np.clip(rounded, float(info.min), float(info.max))
    too_big = inside >= float(info.max)  # 2**63 - 1 is no f8
    result = np.where(too_big, dtype.type(info.max), np.where(too_big, 0, inside).astype(dtype))
    if x.itemsize == 8 or dtype.itemsize == 8:
        result = np.where(nan, np.array(1 << info.bits - 1, f"u{dtype.itemsize}").view(dtype), result)
    return result


# -- integers


def clamp_int(a: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """cvt.sat between integers: `a` within the range of another integer type."""
    own, other = np.iinfo(a.dtype), np.iinfo(dtype)
    return np.clip(a, max(own.min, other.min), min(own.max, other.max))


def mul_wide(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The full product in an integer type twice as wide."""
    return np.multiply(a, b, dtype=dtype)


def mul_hi(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper half of the full product of two integers of one type."""
    bits, kind = 8 * a.dtype.itemsize, a.dtype.kind
    if bits < 64:
        return (np.multiply(a, b, dtype=f"{kind}{bits // 4}") >> bits).astype(a.dtype)
    full = a.astype(object) * b.astype(object) >> 64
    return full.astype(a.dtype)


def divide_int(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Integer division truncated towards zero; all ones for a division by zero, as the hardware's sequence gives."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        quotient = a // safe
    else:
        quotient = a // safe
        quotient = quotient + ((quotient < 0) & (quotient * safe != a))
    return np.where(b == 0, ~np.zeros_like(a), quotient).astype(a.dtype)


def remainder_int(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The remainder with the sign of `a`; `a` itself for a division by zero."""
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, b.dtype.type(1), b))).astype(a.dtype)


def shift_left(a: np.ndarray, count: np.ndarray) -> np.ndarray:
    """a << count, zero for counts of the width or more."""
    bits = 8 * a.dtype.itemsize
    return np.where(count < bits, a << np.minimum(count, bits - 1).astype(a.dtype), a.dtype.type(0))


def shift_right(a: np.ndarray, count: np.ndarray) -> np.ndarray:
    """a >> count, filling with the sign of a signed type, for counts of any size."""
    bits = 8 * a.dtype.itemsize
    if a.dtype.kind == "i":
        return a >> np.minimum(count, bits - 1).astype(a.dtype)
    return np.where(count < bits, a >> np.minimum(count, bits - 1).astype(a.dtype), a.dtype.type(0))


def funnel(low: np.ndarray, high: np.ndarray, count: np.ndarray, left: bool, clamp: bool) -> np.ndarray:
    """shf: shifts the 64 bits {high, low} and returns the upper (left) or lower (right) half."""
    count = np.minimum(count, np.uint32(32)) if clamp else count & np.uint32(31)
    both = (high.astype(np.uint64) << np.uint64(32)) | low
    wide = count.astype(np.uint64)
    return ((both << wide) >> np.uint64(32)).astype(np.uint32) if left else (both >> wide).astype(np.uint32)


def lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """Any bitwise function of three inputs: bit (4a + 2b + c) of `table`."""
    result = np.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            result = result | ((a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c))
    return result


def permute_bytes(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """prmt in its default mode: four bytes picked from {b, a}; bit 3 of a selector replicates the byte's sign."""
    both = (b.astype(np.uint64) << np.uint64(32)) | a
    result = np.uint32(0)
    for position in range(4):
        select = (selector >> np.uint32(4 * position)).astype(np.uint64)
        byte = (both >> ((select & np.uint64(7)) * np.uint64(8))).astype(np.uint32) & np.uint32(0xFF)
        sign = np.where(byte & 0x80, np.uint32(0xFF), np.uint32(0))
        result = result | np.where(select & np.uint64(8), sign, byte) << np.uint32(8 * position)
    return result


def bit_extract_u(a: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """bfe of an unsigned type: `length` bits from bit `start`, both taken modulo 256."""
    start, length = start & 0xFF, length & 0xFF
    ones = ~shift_left(~np.zeros_like(a), length)
    return shift_right(a, start) & ones


def bit_extract_s(a: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """bfe of a signed type: the field's sign is its top bit, or the top bit of `a` where the field reaches beyond."""
    bits = 8 * a.dtype.itemsize
    start, length = start & 0xFF, length & 0xFF
    field = shift_right(a, start)
    unused = bits - np.minimum(length, bits).astype(np.int64)
    kept = field << np.minimum(unused, bits - 1).astype(a.dtype) >> np.minimum(unused, bits - 1).astype(a.dtype)
    return np.where(length == 0, a.dtype.type(0), kept)


def bit_insert(a: np.ndarray, b: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """bfi: `length` low bits of `a` put into `b` at bit `start`."""
    start, length = start & 0xFF, length & 0xFF
    field = shift_left(~shift_left(~np.zeros_like(a), length), start)
    return (b & ~field) | (shift_left(a, start) & field)


def leading_zeros(a: np.ndarray) -> np.ndarray:
    """clz, as u4."""
    bits = 8 * a.dtype.itemsize
    return (np.uint32(bits - 1) - bit_find(a)).astype(np.uint32)


def bit_find(a: np.ndarray) -> np.ndarray:
    """bfind of an unsigned type: the position of the highest set bit, 0xffffffff if there is none; as u4."""
    result = np.full(a.shape, 0xFFFFFFFF, np.uint32)
    for position in range(8 * a.dtype.itemsize):
        result = np.where(a >> a.dtype.type(position) != 0, np.uint32(position), result)
    return result


def bit_reverse(a: np.ndarray) -> np.ndarray:
    """brev."""
    bits = 8 * a.dtype.itemsize
    result = np.zeros_like(a)
    for position in range(bits):
        result |= (a >> a.dtype.type(position) & a.dtype.type(1)) << a.dtype.type(bits - 1 - position)
    return result


# -- packed halves


def halves_of(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lower and the upper 16 bits (u2) of u4."""
    return x.astype(np.uint16), (x >> np.uint32(16)).astype(np.uint16)


def join_halves(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """u4 from its lower and upper 16 bits (u2)."""
    return (high.astype(np.uint32) << np.uint32(16)) | low
