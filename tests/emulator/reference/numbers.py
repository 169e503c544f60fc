"""IEEE formats: bits to exact numbers and back.

A number (-1)**sign * mantissa * 2**exponent is (sign, mantissa, exponent), with a mantissa of any size; infinity is
(sign, None, 0), NaN is None.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """Widths of the exponent and of the stored mantissa."""

    exponent: int
    mantissa: int

    @property
    def width(self):
        return 1 + self.exponent + self.mantissa

    @property
    def lowest(self):
        """The exponent of the last bit of a subnormal number."""
        return 2 - (1 << (self.exponent - 1)) - self.mantissa

    @property
    def infinity(self):
        return ((1 << self.exponent) - 1) << self.mantissa

    @property
    def canonical_nan(self):
        return (1 << (self.width - 1)) - 1


FORMATS = {"f16": Format(5, 10), "bf16": Format(8, 7), "f32": Format(8, 23), "f64": Format(11, 52)}


def decode(format, bits):
    sign, rest = bits >> (format.width - 1), bits & ((1 << (format.width - 1)) - 1)
    if rest > format.infinity:
        return None
    if rest == format.infinity:
        return sign, None, 0
    exponent, mantissa = rest >> format.mantissa, rest & ((1 << format.mantissa) - 1)
    if exponent == 0:
        return sign, mantissa, format.lowest
    return sign, mantissa | 1 << format.mantissa, format.lowest + exponent - 1


def encode(format, number, mode="rn"):
    """The bits of a number, rounded."""
    if number is None:
        return format.canonical_nan
    sign, mantissa, exponent = number
    if mantissa is None:
        return sign << (format.width - 1) | format.infinity
    return encode_ratio(format, sign, mantissa, 1, exponent, mode)


def encode_ratio(format, sign, numerator, denominator, exponent=0, mode="rn"):
    """The bits of numerator / denominator * 2**exponent, rounded."""
    top = numerator.bit_length() - denominator.bit_length() + exponent  # the number's first bit is this one or the next
    if not _at_least(numerator, denominator, top - exponent):
        top -= 1
    last = max(top - format.mantissa, format.lowest)
    quotient, has_rest, half = _scaled(numerator, denominator, exponent - last)
    up = {"rn": half > 0 or (half == 0 and quotient % 2), "rz": False, "rm": sign, "rp": not sign}[mode]
    quotient += bool(up and has_rest)
    bits = ((last - format.lowest) << format.mantissa) + quotient if quotient else 0
    if bits >= format.infinity:
        away = mode == "rn" or mode == ("rm" if sign else "rp")
        bits = format.infinity if away else format.infinity - 1
    return sign << (format.width - 1) | bits


def _at_least(numerator, denominator, power):
    """Whether numerator / denominator >= 2**power."""
    return numerator << max(0, -power) >= denominator << max(0, power)


def _scaled(numerator, denominator, shift):
    """floor(numerator / denominator * 2**shift), whether there is a rest, and the sign of the rest less one half."""
    numerator, denominator = numerator << max(0, shift), denominator << max(0, -shift)
    quotient, rest = divmod(numerator, denominator)
    return quotient, rest > 0, (2 * rest > denominator) - (2 * rest < denominator)


# -- arithmetic on numbers


def is_infinite(x):
    return x is not None and x[1] is None


def negated(x):
    return x and (1 - x[0], *x[1:])


def product(x, y):
    if x is None or y is None:
        return None
    sign = x[0] ^ y[0]
    if x[1] is None or y[1] is None:
        return None if x[1] == 0 or y[1] == 0 else (sign, None, 0)
    return sign, x[1] * y[1], x[2] + y[2]


def total(x, y, mode="rn"):
    """x + y; a sum of opposites is +0, but -0 when rounding down."""
    if x is None or y is None:
        return None
    if x[1] is None or y[1] is None:
        if x[1] is None and y[1] is None:
            return x if x[0] == y[0] else None
        return x if x[1] is None else y
    exponent = min(x[2], y[2])
    value = sum((-1) ** sign * mantissa << (own - exponent) for sign, mantissa, own in (x, y))
    if value == 0:
        return (x[0] if x[0] == y[0] else int(mode == "rm")), 0, 0
    return int(value < 0), abs(value), exponent


def quotient_bits(format, x, y):
    """x / y, rounded to nearest."""
    if x is None or y is None:
        return format.canonical_nan
    sign = x[0] ^ y[0]
    if x[1] is None or y[1] == 0:
        undefined = y[1] is None if x[1] is None else x[1] == 0
        return format.canonical_nan if undefined else encode(format, (sign, None, 0))
    if y[1] is None or x[1] == 0:
        return encode(format, (sign, 0, 0))
    return encode_ratio(format, sign, x[1], y[1], x[2] - y[2])


def root_bits(format, x):
    """The square root, rounded to nearest."""
    if x is None or (x[0] and x[1] != 0):
        return format.canonical_nan
    if not x[1]:
        return encode(format, x)
    mantissa, exponent = x[1] << 200 + x[2] % 2, x[2] - x[2] % 2 - 200
    root = math.isqrt(mantissa)
    return encode(format, (0, 2 * root + (root * root < mantissa), exponent // 2 - 1))  # the last bit: there is a rest


def compare(x, y):
    """-1, 0 or 1 for numbers that are not NaN."""
    if is_infinite(x) or is_infinite(y):
        a, b = ((-1) ** v[0] if is_infinite(v) else 0 for v in (x, y))
        return (a > b) - (a < b)
    difference = total(x, negated(y))
    return 0 if difference[1] == 0 else (-1) ** difference[0]


def to_integer(x, mode):
    """A finite number rounded to an integer."""
    sign, mantissa, exponent = x
    quotient, has_rest, half = _scaled(mantissa, 1, exponent)
    up = {"rni": half > 0 or (half == 0 and quotient % 2), "rzi": False, "rmi": sign, "rpi": not sign}[mode]
    return (-1) ** sign * (quotient + bool(up and has_rest))
