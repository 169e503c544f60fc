"""What each instruction makes of its operands (PTX ISA 9.1, chapter 9.7). Operands of .s types are Python integers with
a sign, predicates are bools, all others are bits."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from . import numbers
from .numbers import FORMATS, compare, decode, encode, negated, product, to_integer, total


@dataclass(frozen=True)
class Semantics:
    """The types of the operands and the function of them; its results are cut to the type. `pair`: it gives d|p."""

    result: str
    sources: tuple[str, ...]
    function: Callable
    pair: bool = False


@cache
def width_of(type):
    """Bits of a type."""
    return {"pred": 1, "f16x2": 32, "bf16x2": 32, "bf16": 16}.get(type) or int(type[1:])


@cache
def semantics(opcode):
    """The meaning of an opcode that only computes."""
    root, *modifiers = opcode.split(".")
    type = modifiers[-1]
    if root == "cvt":
        return conversion(modifiers)
    if root in ("setp", "set"):
        return comparison(root, modifiers)
    if root == "selp":
        return Semantics(type, (type, type, "pred"), lambda a, b, p: a if p else b)
    if root == "slct":
        chooser, type = modifiers[-1], modifiers[-2]
        return Semantics(type, (type, type, chooser), lambda a, b, c: a if at_least_zero(c, chooser) else b)
    if root == "mov":
        return Semantics(type, (type,), lambda a: a)
    if type in ("f16x2", "bf16x2"):
        return packed(semantics(opcode.removesuffix("x2")), type)
    if type in FORMATS:
        return float_arithmetic(root, modifiers)
    return integer_arithmetic(root, modifiers)


# -- integers


def truncated(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def shifted(a, n, width):
    """a * 2**n for n of either sign, as a register of `width` bits without a sign sees it."""
    return 0 if abs(n) >= width else a << n if n >= 0 else a >> -n


def bit_field(a, start, length, width, is_signed):
    start, length = start & 255, length & 255
    bits = a & ((1 << width) - 1)
    sign = bits >> min(start + length - 1, width - 1) & 1 if is_signed and length else 0
    places = range(width)
    return sum((bits >> start + n & 1 if n < length and start + n < width else sign) << n for n in places)


def inserted(a, b, start, length, width):
    start, length = start & 255, length & 255
    for n in range(min(length, max(0, width - start))):
        b = b & ~(1 << start + n) | (a >> n & 1) << start + n
    return b


def permuted(a, b, selector):
    octets, result = (b << 32 | a).to_bytes(8, "little"), 0
    for n in range(4):
        select = selector >> 4 * n & 15
        octet = octets[select & 7]
        result |= ((0xFF if octet >> 7 else 0) if select & 8 else octet) << 8 * n
    return result


def looked_up(a, b, c, table):
    return sum((table >> (4 * (a >> n & 1) + 2 * (b >> n & 1) + (c >> n & 1)) & 1) << n for n in range(32))


def integer_arithmetic(root, modifiers):
    type = modifiers[-1]
    width = width_of(type)
    same = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "div": truncated,
        "rem": lambda a, b: a - b * truncated(a, b),
        "min": min,
        "max": max,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
        "abs": abs,
        "neg": lambda a: -a,
        "not": lambda a: not a if type == "pred" else ~a,
        "cnot": lambda a: a == 0,
        "brev": lambda a: int(f"{a:0{width}b}"[::-1], 2),
        "prmt": permuted,
    }
    if root in same:
        function = same[root]
        count = 3 if root == "prmt" else 1 if root in ("abs", "neg", "not", "cnot", "brev") else 2
        return Semantics(type, (type,) * count, function)
    if root in ("mul", "mad"):
        part = modifiers[0]
        wide = f"{type[0]}{2 * width}" if part == "wide" else type
        shift = width if part == "hi" else 0
        if root == "mul":
            return Semantics(wide, (type, type), lambda a, b: a * b >> shift)
        return Semantics(wide, (type, type, wide), lambda a, b, c: (a * b >> shift) + c)
    others = {
        "shl": ((type, "u32"), type, lambda a, n: shifted(a, n, width)),
        "shr": ((type, "u32"), type, lambda a, n: a >> min(n, width)),
        "bfe": ((type, "u32", "u32"), type, lambda a, s, n: bit_field(a, s, n, width, type[0] == "s")),
        "bfi": ((type, type, "u32", "u32"), type, lambda a, b, s, n: inserted(a, b, s, n, width)),
        "popc": ((type,), "u32", lambda a: a.bit_count()),
        "clz": ((type,), "u32", lambda a: width - a.bit_length()),
        "bfind": ((type,), "u32", lambda a: a.bit_length() - 1),
        "lop3": (("b32", "b32", "b32", "u32"), "b32", looked_up),
    }
    if root == "shf":
        side, mode = modifiers[:2]
        limit = (lambda n: min(n, 32)) if mode == "clamp" else (lambda n: n & 31)
        if side == "l":
            return Semantics("b32", ("b32", "b32", "u32"), lambda a, b, n: (b << 32 | a) << limit(n) >> 32)
        return Semantics("b32", ("b32", "b32", "u32"), lambda a, b, n: (b << 32 | a) >> limit(n))
    sources, result, function = others[root]
    return Semantics(result, sources, function)


# -- floats


def flushed(type, bits):
    """Subnormal f32 become zero of their sign."""
    return bits & 0x80000000 if type == "f32" and bits & 0x7F800000 == 0 else bits


def saturated(type, bits):
    number = decode(FORMATS[type], bits)
    if number is None or number[0] or number[1] == 0:
        return 0
    one = 0, 1, 0
    return encode(FORMATS[type], one) if compare(number, one) > 0 else bits


def smaller(format, a, b, keeps_nan, sign):
    """min (sign 0) or max (sign 1) of bits; -0 is less than +0."""
    x, y = decode(format, a), decode(format, b)
    if x is None or y is None:
        if keeps_nan or (x is None and y is None):
            return format.canonical_nan
        return b if x is None else a
    order = compare(x, y) or (y[0] - x[0])
    return (a if order < 0 else b) if sign == 0 else (a if order > 0 else b)


def at_least_zero(value, type):
    if type == "s32":
        return value >= 0
    number = decode(FORMATS[type], value)
    return number is not None and compare(number, (0, 0, 0)) >= 0


def float_arithmetic(root, modifiers):
    type = modifiers[-1]
    format = FORMATS[type]
    mode = next((m for m in modifiers if m in ("rz", "rm", "rp")), "rn")
    top = 1 << (format.width - 1)

    def rounded(function):
        return lambda *bits: encode(format, function(*(decode(format, each) for each in bits)), mode)

    table = {
        "add": (2, rounded(lambda x, y: total(x, y, mode))),
        "sub": (2, rounded(lambda x, y: total(x, negated(y), mode))),
        "mul": (2, rounded(product)),
        "fma": (3, rounded(lambda x, y, z: total(product(x, y), z, mode))),
        "mad": (3, rounded(lambda x, y, z: total(product(x, y), z, mode))),
        "div": (2, lambda a, b: numbers.quotient_bits(format, decode(format, a), decode(format, b))),
        "rcp": (1, lambda a: numbers.quotient_bits(format, (0, 1, 0), decode(format, a))),
        "sqrt": (1, lambda a: numbers.root_bits(format, decode(format, a))),
        "min": (2, lambda a, b: smaller(format, a, b, "NaN" in modifiers, 0)),
        "max": (2, lambda a, b: smaller(format, a, b, "NaN" in modifiers, 1)),
        "abs": (1, lambda a: a & ~top),
        "neg": (1, lambda a: a ^ top),
        "copysign": (2, lambda a, b: a & top | b & ~top),
    }  # fmt: skip
    count, function = table[root]

    def modified(*bits):
        if "ftz" in modifiers:
            bits = [flushed(type, each) for each in bits]
        result = function(*bits)
        if "ftz" in modifiers:
            result = flushed(type, result)
        if "sat" in modifiers:
            result = saturated(type, result)
        return smaller(format, result, 0, True, 1) if "relu" in modifiers else result

    return Semantics(type, (type,) * count, modified)


def packed(each, type):
    def function(*pairs):
        low = each.function(*(pair & 0xFFFF for pair in pairs)) & 0xFFFF
        return low | (each.function(*(pair >> 16 for pair in pairs)) & 0xFFFF) << 16

    return Semantics(type, (type,) * len(each.sources), function)


# -- comparisons


def holds(name, type, a, b):
    if type in FORMATS:
        x, y = decode(FORMATS[type], a), decode(FORMATS[type], b)
        if x is None or y is None:
            return name == "nan" or (name.endswith("u") and len(name) == 3)
        if name in ("num", "nan"):
            return name == "num"
        order, name = compare(x, y), name[:2]
    else:
        order = (a > b) - (a < b)
        name = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(name, name)
    return {"eq": order == 0, "ne": order != 0, "lt": order < 0, "le": order <= 0, "gt": order > 0, "ge": order >= 0}[
        name
    ]


def comparison(root, modifiers):
    name, type = modifiers[0], modifiers[-1]
    boolean = modifiers[1] if modifiers[1] in ("and", "or", "xor") else ""
    flush = (lambda bits: flushed(type, bits)) if "ftz" in modifiers else (lambda bits: bits)

    def combined(value, c):
        return {"and": value and c, "or": value or c, "xor": value != c}[boolean] if boolean else value

    def predicates(a, b, c=None):
        value = holds(name, type, flush(a), flush(b))
        return combined(value, c), combined(not value, c)

    if root == "setp":
        return Semantics("pred", (type, type) + ("pred",) * bool(boolean), predicates, pair=True)
    true = 0x3F800000 if modifiers[-2] == "f32" else 0xFFFFFFFF
    return Semantics(modifiers[-2], (type, type), lambda a, b: true if predicates(a, b)[0] else 0)


# -- conversions


def integer_range(type):
    bits = width_of(type)
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if type[0] == "s" else (0, (1 << bits) - 1)


def conversion(modifiers):
    target, source = modifiers[-2:]
    flags = set(modifiers[:-2])
    if target in ("f16x2", "bf16x2"):
        each = conversion([*modifiers[:-2], target.removesuffix("x2"), source]).function
        return Semantics(target, (source, source), lambda a, b: each(a) << 16 | each(b))
    if re.match(r"[us]\d", target):
        low, high = integer_range(target)
        if re.match(r"[us]\d", source):
            clamp = (lambda a: max(low, min(high, a))) if "sat" in flags else (lambda a: a)
            return Semantics(target, (source,), clamp)
        return Semantics(target, (source,), lambda a: float_to_integer(a, source, target, flags, low, high))
    format = FORMATS[target]
    mode = next((m for m in ("rz", "rm", "rp") if m in flags), "rn")
    integral = next((m for m in flags if m in ("rni", "rzi", "rmi", "rpi")), None)

    def to_float(a):
        if source not in FORMATS:
            number = int(a < 0), abs(a), 0
        else:
            number = decode(FORMATS[source], flushed(source, a) if "ftz" in flags else a)
            if integral and number is not None and number[1] is not None:
                number = number[0], abs(to_integer(number, integral)), 0
        bits = encode(format, number, mode)
        if "ftz" in flags:
            bits = flushed(target, bits)
        if "sat" in flags:
            bits = saturated(target, bits)
        return smaller(format, bits, 0, True, 1) if "relu" in flags else bits

    return Semantics(target, (source,), to_float)


def float_to_integer(bits, source, target, flags, low, high):
    number = decode(FORMATS[source], flushed(source, bits) if "ftz" in flags else bits)
    if number is None:
        return 1 << width_of(target) - 1 if source == "f64" or target in ("s64", "u64") else 0
    if number[1] is None:
        return low if number[0] else high
    (mode,) = flags & {"rni", "rzi", "rmi", "rpi"}
    return max(low, min(high, to_integer(number, mode)))
