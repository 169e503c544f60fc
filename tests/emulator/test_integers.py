"""Integer arithmetic, logic and bit fields against Python's integers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import run_lanes

LANES = 32


def signed(bits, width):
    return bits - (1 << width) if bits >> (width - 1) else bits


def truncated_division(a, b):
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def funnel(low, high, count):
    return (high << 32 | low), count


def bit_field(value, start, length, width, is_signed):
    start, length = start & 0xFF, length & 0xFF
    if length == 0:
        return 0
    sign = is_signed and value >> min(start + length - 1, width - 1) & 1
    result = 0
    for n in range(width):
        inside = n < length and start + n < width
        result |= (value >> (start + n) & 1 if inside else sign) << n
    return result


def inserted(a, b, start, length, width):
    start, length = start & 0xFF, length & 0xFF
    for n in range(length):
        if start + n < width:
            b = b & ~(1 << (start + n)) | (a >> n & 1) << (start + n)
    return b


def permuted(a, b, selector):
    source = [(b << 32 | a) >> 8 * n & 0xFF for n in range(8)]
    result = 0
    for n in range(4):
        select = selector >> 4 * n & 15
        byte = source[select & 7]
        if select & 8:
            byte = 0xFF if byte & 0x80 else 0
        result |= byte << 8 * n
    return result


# opcode -> (types of the sources, type of the result, function of Python integers: signed types come as signed)
CASES = {
    "add.s16": ("s16 s16", "s16", lambda a, b: a + b),
    "add.s32": ("s32 s32", "s32", lambda a, b: a + b),
    "add.u64": ("u64 u64", "u64", lambda a, b: a + b),
    "sub.u32": ("u32 u32", "u32", lambda a, b: a - b),
    "sub.s64": ("s64 s64", "s64", lambda a, b: a - b),
    "mul.lo.s32": ("s32 s32", "s32", lambda a, b: a * b),
    "mul.lo.u64": ("u64 u64", "u64", lambda a, b: a * b),
    "mul.hi.u32": ("u32 u32", "u32", lambda a, b: a * b >> 32),
    "mul.hi.s32": ("s32 s32", "s32", lambda a, b: a * b >> 32),
    "mul.hi.u64": ("u64 u64", "u64", lambda a, b: a * b >> 64),
    "mul.hi.s64": ("s64 s64", "s64", lambda a, b: a * b >> 64),
    "mul.wide.u16": ("u16 u16", "u32", lambda a, b: a * b),
    "mul.wide.s32": ("s32 s32", "s64", lambda a, b: a * b),
    "mul.wide.u32": ("u32 u32", "u64", lambda a, b: a * b),
    "mad.lo.s32": ("s32 s32 s32", "s32", lambda a, b, c: a * b + c),
    "mad.hi.u32": ("u32 u32 u32", "u32", lambda a, b, c: (a * b >> 32) + c),
    "mad.wide.s32": ("s32 s32 s64", "s64", lambda a, b, c: a * b + c),
    "mad.wide.u32": ("u32 u32 u64", "u64", lambda a, b, c: a * b + c),
    "div.s32": ("s32 s32", "s32", lambda a, b: truncated_division(a, b) if b else -1),
    "div.u32": ("u32 u32", "u32", lambda a, b: a // b if b else -1),
    "div.s64": ("s64 s64", "s64", lambda a, b: truncated_division(a, b) if b else -1),
    "rem.s32": ("s32 s32", "s32", lambda a, b: a - b * truncated_division(a, b) if b else a),
    "rem.u32": ("u32 u32", "u32", lambda a, b: a % b if b else a),
    "min.s32": ("s32 s32", "s32", min),
    "min.u32": ("u32 u32", "u32", min),
    "max.s64": ("s64 s64", "s64", max),
    "max.u16": ("u16 u16", "u16", max),
    "abs.s32": ("s32", "s32", abs),
    "neg.s32": ("s32", "s32", lambda a: -a),
    "neg.s64": ("s64", "s64", lambda a: -a),
    "and.b32": ("u32 u32", "u32", lambda a, b: a & b),
    "or.b64": ("u64 u64", "u64", lambda a, b: a | b),
    "xor.b16": ("u16 u16", "u16", lambda a, b: a ^ b),
    "not.b32": ("u32", "u32", lambda a: ~a),
    "cnot.b32": ("u32", "u32", lambda a: int(a == 0)),
    "shl.b32": ("u32 count", "u32", lambda a, n: a << n if n < 32 else 0),
    "shl.b64": ("u64 count", "u64", lambda a, n: a << n if n < 64 else 0),
    "shr.u32": ("u32 count", "u32", lambda a, n: a >> n),
    "shr.s32": ("s32 count", "s32", lambda a, n: a >> n),
    "shr.s64": ("s64 count", "s64", lambda a, n: a >> n),
    "shr.b16": ("u16 count", "u16", lambda a, n: a >> n),
    "shf.l.wrap.b32": ("u32 u32 count", "u32", lambda a, b, n: (b << 32 | a) << (n & 31) >> 32),
    "shf.l.clamp.b32": ("u32 u32 count", "u32", lambda a, b, n: (b << 32 | a) << min(n, 32) >> 32),
    "shf.r.wrap.b32": ("u32 u32 count", "u32", lambda a, b, n: (b << 32 | a) >> (n & 31)),
    "shf.r.clamp.b32": ("u32 u32 count", "u32", lambda a, b, n: (b << 32 | a) >> min(n, 32)),
    "prmt.b32": ("u32 u32 u32", "u32", permuted),
    "bfe.u32": ("u32 count count", "u32", lambda a, s, n: bit_field(a, s, n, 32, False)),
    "bfe.s32": ("u32 count count", "u32", lambda a, s, n: bit_field(a, s, n, 32, True)),
    "bfe.u64": ("u64 count count", "u64", lambda a, s, n: bit_field(a, s, n, 64, False)),
    "bfe.s64": ("u64 count count", "u64", lambda a, s, n: bit_field(a, s, n, 64, True)),
    "bfi.b32": ("u32 u32 count count", "u32", lambda a, b, s, n: inserted(a, b, s, n, 32)),
    "bfi.b64": ("u64 u64 count count", "u64", lambda a, b, s, n: inserted(a, b, s, n, 64)),
    "brev.b32": ("u32", "u32", lambda a: int(f"{a:032b}"[::-1], 2)),
    "popc.b32": ("u32", "u32", lambda a: a.bit_count()),
    "popc.b64": ("u64", "u32", lambda a: a.bit_count()),
    "clz.b32": ("u32", "u32", lambda a: 32 - a.bit_length()),
    "clz.b64": ("u64", "u32", lambda a: 64 - a.bit_length()),
    "bfind.u32": ("u32", "u32", lambda a: a.bit_length() - 1),
    "cvt.s64.s32": ("s32", "s64", lambda a: a),
    "cvt.u64.u32": ("u32", "u64", lambda a: a),
    "cvt.u32.u64": ("u64", "u32", lambda a: a),
    "cvt.u16.u32": ("u32", "u16", lambda a: a),
    "cvt.s32.s16": ("s16", "s32", lambda a: a),
    "cvt.u32.u16": ("u16", "u32", lambda a: a),
    "cvt.s32.s8": ("s32", "s32", lambda a: signed(a & 0xFF, 8)),
    "cvt.sat.u16.u32": ("u32", "u16", lambda a: min(a, 0xFFFF)),
    "cvt.sat.s16.s32": ("s32", "s16", lambda a: max(-0x8000, min(a, 0x7FFF))),
    "cvt.sat.u32.s32": ("s32", "u32", lambda a: max(a, 0)),
}  # fmt: skip


def bit_patterns(type_name):
    if type_name == "count":
        return st.integers(0, 70) | st.sampled_from([255, 256, 1 << 31])
    width = int(type_name[1:])
    corners = [0, 1, 2, (1 << width) - 1, 1 << (width - 1), (1 << (width - 1)) - 1]
    return st.sampled_from(corners) | st.integers(0, (1 << width) - 1)


@pytest.mark.parametrize("opcode", CASES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_integer_instruction(opcode, data):
    sources, result, function = CASES[opcode]
    names = "abcd"[: len(sources.split())]
    inputs, arguments = {}, []
    for name, source in zip(names, sources.split(), strict=True):
        values = data.draw(st.lists(bit_patterns(source), min_size=LANES, max_size=LANES), label=name)
        width = 32 if source == "count" else int(source[1:])
        inputs[name] = np.array(values, f"u{width // 8}")
        arguments.append([signed(value, width) for value in values] if source[0] == "s" else values)
    width = int(result[1:])
    outputs, _ = run_lanes(f"{opcode} result, {', '.join(names)};", inputs, {"result": f"u{width // 8}"})
    expected = [function(*lane) % (1 << width) for lane in zip(*arguments, strict=True)]
    assert outputs["result"].tolist() == expected


@pytest.mark.parametrize("table", [0x00, 0x01, 0x96, 0xE8, 0xCA, 0x3F, 0xFF])
def test_lop3(table):
    random = np.random.default_rng(table)
    a, b, c = (random.integers(0, 1 << 32, LANES, np.uint32) for _ in range(3))
    outputs, _ = run_lanes(f"lop3.b32 d, a, b, c, {table};", {"a": a, "b": b, "c": c}, {"d": "u4"})
    for x, y, z, result in zip(a.tolist(), b.tolist(), c.tolist(), outputs["d"].tolist(), strict=True):
        bits = [table >> (4 * (x >> n & 1) + 2 * (y >> n & 1) + (z >> n & 1)) & 1 for n in range(32)]
        assert result == sum(bit << n for n, bit in enumerate(bits))


COMPARISONS = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "lo": lambda a, b: a < b, "ls": lambda a, b: a <= b, "hi": lambda a, b: a > b, "hs": lambda a, b: a >= b,
}  # fmt: skip


@pytest.mark.parametrize("type_name", ["s32", "u32", "u64", "s16"])
@pytest.mark.parametrize("name", COMPARISONS)
def test_integer_comparison(name, type_name):
    width = int(type_name[1:])
    random = np.random.default_rng(7)
    a = random.integers(0, 1 << width, LANES, np.uint64).astype(f"u{width // 8}")
    b = np.where(np.arange(LANES) % 3 == 0, a, random.permutation(a)).astype(a.dtype)
    outputs, _ = run_lanes(f"setp.{name}.{type_name} p|q, a, b;", {"a": a, "b": b}, {"p": "?", "q": "?"})
    decode = (lambda x: signed(x, width)) if type_name[0] == "s" else (lambda x: x)
    expected = [COMPARISONS[name](decode(x), decode(y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert outputs["p"].tolist() == expected
    assert outputs["q"].tolist() == [not value for value in expected]


@pytest.mark.parametrize(("name", "combine"), [("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)])
def test_comparison_combined_with_a_predicate(name, combine):
    a = np.arange(LANES, dtype=np.uint32)
    c = a % 3 == 0
    outputs, _ = run_lanes(
        f"setp.lt.{name}.u32 p|q, a, 16, !c;", {"a": a, "c": c}, {"p": "?", "q": "?"}
    )  # fmt: skip
    assert (outputs["p"] == combine(a < 16, ~c)).all()
    assert (outputs["q"] == combine(a >= 16, ~c)).all()


def test_selections():
    a, b = np.arange(LANES, dtype=np.uint32), np.arange(100, 100 + LANES, dtype=np.uint32)
    c = np.where(np.arange(LANES) % 2, -1, 1).astype(np.int32).view(np.uint32)
    code = "setp.gt.s32 p, c, 0; selp.b32 d, a, b, p; slct.u32.s32 e, a, b, c;"
    outputs, _ = run_lanes(code, {"a": a, "b": b, "c": c}, {"d": "u4", "e": "u4"}, registers=".reg .pred p;")
    expected = np.where(c.view(np.int32) > 0, a, b)
    assert (outputs["d"] == expected).all()
    assert (outputs["e"] == expected).all()


def test_pack_and_unpack():
    a = np.random.default_rng(3).integers(0, 1 << 32, LANES, np.uint32)
    code = "mov.b32 {low, high}, a; mov.b32 swapped, {high, low}; mov.b64 wide, {a, swapped}; mov.b32 upper, {0, low};"
    outputs, _ = run_lanes(
        code, {"a": a}, {"swapped": "u4", "wide": "u8", "upper": "u4"}, registers=".reg .b16 low, high;"
    )
    swapped = a >> 16 | a << np.uint32(16)
    assert (outputs["swapped"] == swapped).all()
    assert (outputs["wide"] == (swapped.astype(np.uint64) << np.uint64(32) | a)).all()
    assert (outputs["upper"] == a << np.uint32(16)).all()
