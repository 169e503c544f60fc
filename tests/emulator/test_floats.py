"""Floating-point arithmetic, halves and conversions against wider arithmetic and torch's rounding."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import run_lanes

LANES = 32
SPECIAL = [0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40, 3.4e38, 1e-30, 65504.0, 1e9]


@st.composite
def floats(draw):
    """A value a lane: any bits, moderate numbers, and special ones."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    any_bits = random.integers(0, 1 << 32, LANES, np.uint32).view(np.float32)
    moderate = random.normal(scale=random.choice([1e-3, 1, 1e3, 1e8]), size=LANES).astype(np.float32)
    special = random.choice(np.array(SPECIAL, np.float32), LANES)
    return np.choose(random.integers(0, 3, LANES), [any_bits, moderate, special])


def flushed(x):
    """Subnormal f32 become zero of their sign."""
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)


def same(actual, expected):
    """Equal bits, but that any NaN equals any NaN."""
    both_nan = np.isnan(actual) & np.isnan(expected)
    bits = f"u{actual.dtype.itemsize}"
    return bool((both_nan | (actual.view(bits) == expected.astype(actual.dtype).view(bits))).all())


def fused(a, b, c):
    wide = np.longdouble
    return (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(np.float32)


def saturated(x):
    return np.array([min(value, 1.0) if value > 0 else 0.0 for value in x.tolist()], np.float32)


F32 = {
    "add.f32": lambda a, b: a + b,
    "add.rn.f32": lambda a, b: a + b,
    "sub.f32": lambda a, b: a - b,
    "mul.f32": lambda a, b: a * b,
    "mul.sat.f32": lambda a, b: saturated(a * b),
    "add.ftz.f32": lambda a, b: flushed(flushed(a) + flushed(b)),
    "mul.rn.ftz.f32": lambda a, b: flushed(flushed(a) * flushed(b)),
    "fma.rn.f32": fused,
    "mad.rn.f32": fused,
    "fma.rn.ftz.f32": lambda a, b, c: flushed(fused(flushed(a), flushed(b), flushed(c))),
    "fma.rn.sat.f32": lambda a, b, c: saturated(fused(a, b, c)),
    "div.rn.f32": lambda a, b: a / b,
    "div.full.f32": lambda a, b: a / b,
    "rcp.rn.f32": lambda a: np.float32(1) / a,
    "rcp.approx.ftz.f32": lambda a: flushed(np.float32(1) / flushed(a)),
    "sqrt.rn.f32": np.sqrt,
    "abs.f32": np.abs,
    "neg.f32": lambda a: -a,
    "neg.ftz.f32": lambda a: -flushed(a),
    "copysign.f32": lambda a, b: np.copysign(b, a),
    "cvt.rni.f32.f32": np.rint,
    "cvt.rzi.f32.f32": np.trunc,
    "cvt.rmi.f32.f32": np.floor,
    "cvt.rpi.f32.f32": np.ceil,
    "cvt.sat.f32.f32": saturated,
}


@pytest.mark.parametrize("opcode", F32)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_f32_instruction(opcode, data):
    function = F32[opcode]
    names = "abc"[: 3 if opcode[:3] in ("fma", "mad") else 1 if function in (np.sqrt, np.abs) else 2]
    if opcode.split(".")[0] in ("rcp", "neg", "cvt"):
        names = "a"
    inputs = {name: data.draw(floats(), label=name) for name in names}
    outputs, _ = run_lanes(f"{opcode} result, {', '.join(names)};", inputs, {"result": "f4"})
    with np.errstate(all="ignore"):
        assert same(outputs["result"], function(*inputs.values()))


@pytest.mark.parametrize(
    ("b", "expected"),
    [(2.0**126, 2.0**-126), (1.5 * 2.0**126, 0.0), (-(2.0**127), -0.0), (np.inf, 0.0), (2.0, 0.5)],
)
def test_approximate_division_by_what_has_no_reciprocal(b, expected):
    """PTX ISA, "div": for 2**126 < |b| < 2**128, infinity / b is NaN and all else is zero."""
    b = np.full(LANES, b, np.float32)
    one, infinite = np.ones(LANES, np.float32), np.full(LANES, np.inf, np.float32)
    code = "div.approx.f32 d, a, b; div.approx.f32 e, i, b; div.full.f32 f, a, b;"
    outputs, _ = run_lanes(code, {"a": one, "b": b, "i": infinite}, {"d": "f4", "e": "f4", "f": "f4"})
    assert same(outputs["d"], np.full(LANES, expected, np.float32))
    assert np.isnan(outputs["e"]).all() == (abs(b[0]) > 2.0**126)
    assert same(outputs["f"], one / b)


@pytest.mark.parametrize("name", ["min", "max"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_min_and_max_prefer_numbers_to_nan(name, data):
    a, b = (data.draw(floats(), label=label) for label in "ab")
    code = f"{name}.f32 d, a, b; {name}.NaN.f32 e, a, b;"
    outputs, _ = run_lanes(code, {"a": a, "b": b}, {"d": "f4", "e": "f4"})
    pick = min if name == "min" else max
    for x, y, quiet, loud in zip(*(v.tolist() for v in (a, b, outputs["d"], outputs["e"])), strict=True):
        if np.isnan(x) and np.isnan(y):
            assert np.isnan(quiet)
        else:
            assert quiet == (y if np.isnan(x) else x if np.isnan(y) else pick(x, y))
        assert np.isnan(loud) if np.isnan(x) or np.isnan(y) else loud == pick(x, y)


APPROXIMATE = {
    "ex2.approx.f32": np.exp2,
    "ex2.approx.ftz.f32": np.exp2,
    "lg2.approx.f32": np.log2,
    "rsqrt.approx.f32": lambda x: 1 / np.sqrt(x),
    "sqrt.approx.f32": np.sqrt,
    "rcp.approx.f32": lambda x: 1 / x,
    "sin.approx.f32": np.sin,
    "cos.approx.f32": np.cos,
    "tanh.approx.f32": np.tanh,
}


@pytest.mark.parametrize("opcode", APPROXIMATE)
def test_approximate_function(opcode):
    positive = opcode[:3] in ("lg2", "rsq", "sqr", "rcp")
    a = np.linspace(0.01 if positive else -40, 40, LANES).astype(np.float32)
    outputs, _ = run_lanes(f"{opcode} d, a;", {"a": a}, {"d": "f4"})
    np.testing.assert_allclose(outputs["d"], APPROXIMATE[opcode](a.astype(np.float64)), rtol=3e-7, atol=1e-6)


def test_exponential_at_its_limits():
    a = np.array([-np.inf, np.inf, np.nan, 0, -149, -127, -200, 128] * 4, np.float32)
    outputs, _ = run_lanes("ex2.approx.f32 d, a; ex2.approx.ftz.f32 e, a;", {"a": a}, {"d": "f4", "e": "f4"})
    kept = np.array([0, np.inf, np.nan, 1, 2.0**-149, 2.0**-127, 0, np.inf] * 4, np.float32)
    assert same(outputs["d"], kept)
    assert same(outputs["e"], flushed(kept))


def test_f64_arithmetic():
    a, b, c = (np.random.default_rng(n).normal(size=LANES) for n in range(3))
    code = "add.f64 d, a, b; mul.f64 e, a, b; fma.rn.f64 f, a, b, c; div.rn.f64 g, a, b; max.f64 h, a, b;"
    outputs, _ = run_lanes(code, {"a": a, "b": b, "c": c}, dict.fromkeys("defgh", "f8"))
    exact = (a.astype(np.longdouble) * b + c).astype(np.float64)
    for name, expected in zip("defgh", (a + b, a * b, exact, a / b, np.maximum(a, b)), strict=True):
        assert same(outputs[name], expected)


FLOAT_COMPARISONS = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: (a < b) | (a > b), "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "equ": lambda a, b: ~((a < b) | (a > b)), "neu": lambda a, b: a != b, "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}  # fmt: skip


@pytest.mark.parametrize("name", FLOAT_COMPARISONS)
def test_float_comparison(name):
    values = np.array([*SPECIAL, 2.5, -7.0, 1e-41], np.float32)
    a, b = (grid.reshape(-1) for grid in np.meshgrid(values, values))
    outputs, _ = run_lanes(f"setp.{name}.f32 p, a, b;", {"a": a, "b": b}, {"p": "?"}, num_threads=len(a))
    assert (outputs["p"] == FLOAT_COMPARISONS[name](a, b)).all()


def test_comparison_that_flushes_subnormals():
    a = np.array([1e-40, -1e-40, 1.0, 0.0] * 8, np.float32)
    zero = np.zeros(LANES, np.float32)
    code = "setp.gt.ftz.f32 p, a, b; setp.gt.f32 q, a, b;"
    outputs, _ = run_lanes(code, {"a": a, "b": zero}, {"p": "?", "q": "?"})
    assert outputs["p"].tolist() == [False, False, True, False] * 8
    assert outputs["q"].tolist() == [True, False, True, False] * 8


# -- conversions


INT_OF_FLOAT = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@pytest.mark.parametrize("type_name", ["s32", "u32", "s16", "s64", "u64"])
@pytest.mark.parametrize("rounding", INT_OF_FLOAT)
@settings(max_examples=8, deadline=None)
@given(a=floats())
def test_float_to_integer_clamps(rounding, type_name, a):
    width, is_signed = int(type_name[1:]), type_name[0] == "s"
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if is_signed else (0, (1 << width) - 1)
    code = f"cvt.{rounding}.{type_name}.f32 d, a;"
    outputs, _ = run_lanes(code, {"a": a}, {"d": f"u{width // 8}"})
    for x, result in zip(a.tolist(), outputs["d"].tolist(), strict=True):
        if np.isnan(x):
            expected = 1 << 63 if width == 64 else 0
        elif np.isinf(x):
            expected = high if x > 0 else low
        else:
            expected = max(low, min(high, int(INT_OF_FLOAT[rounding](x))))
        assert result == expected % (1 << width)


def test_integer_to_float():
    a = np.random.default_rng(0).integers(0, 1 << 32, LANES, np.uint32)
    code = "cvt.rn.f32.s32 d, a; cvt.rn.f32.u32 e, a; cvt.rn.f64.s32 f, a;"
    outputs, _ = run_lanes(code, {"a": a}, {"d": "f4", "e": "f4", "f": "f8"})
    assert same(outputs["d"], a.view(np.int32).astype(np.float32))
    assert same(outputs["e"], a.astype(np.float32))
    assert same(outputs["f"], a.view(np.int32).astype(np.float64))


def torch_rounded(values, dtype):
    """16-bit patterns of f32 values as torch rounds them."""
    return torch.from_numpy(np.array(values)).to(dtype).view(torch.int16).numpy().view(np.uint16)


HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}


def same_halves(actual, expected, kind):
    as_float = [
        torch.from_numpy(x.view(np.int16).copy()).view(HALVES[kind]).float().numpy() for x in (actual, expected)
    ]
    return same(*as_float)


@pytest.mark.parametrize("kind", HALVES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_rounding_to_halves(kind, data):
    a, b = (data.draw(floats(), label=label) for label in "ab")
    code = f"cvt.rn.{kind}x2.f32 pair, a, b; cvt.rn.{kind}.f32 single, a; cvt.f32.{kind} back, single;"
    outputs, _ = run_lanes(code, {"a": a, "b": b}, {"pair": "u4", "single": "u2", "back": "f4"})
    high, low = torch_rounded(a, HALVES[kind]), torch_rounded(b, HALVES[kind])
    assert same_halves((outputs["pair"] >> 16).astype(np.uint16), high, kind)
    assert same_halves(outputs["pair"].astype(np.uint16), low, kind)
    assert same_halves(outputs["single"], high, kind)
    widened = torch.from_numpy(outputs["single"].view(np.int16).copy()).view(HALVES[kind]).float().numpy()
    assert same(outputs["back"], widened)


def test_nan_becomes_the_canonical_bf16():
    a = np.full(LANES, np.nan, np.float32)
    outputs, _ = run_lanes("cvt.rn.bf16x2.f32 d, a, a;", {"a": a}, {"d": "u4"})
    assert (outputs["d"] == 0x7FFF7FFF).all()


HALF_FUNCTIONS = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "fma.rn": lambda a, b, c: a * b + c, "neg": lambda a: -a, "abs": torch.abs,
}  # fmt: skip


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("name", HALF_FUNCTIONS)
def test_packed_half_arithmetic(name, kind):
    function = HALF_FUNCTIONS[name]
    count = {"fma.rn": 3, "neg": 1, "abs": 1}.get(name, 2)
    generator = torch.Generator().manual_seed(1)
    halves = [torch.randn(2 * LANES, generator=generator).to(HALVES[kind]) for _ in range(count)]
    inputs = {n: half.view(torch.int16).numpy().view(np.uint32) for n, half in zip("abc", halves, strict=False)}
    outputs, _ = run_lanes(f"{name}.{kind}x2 d, {', '.join(inputs)};", inputs, {"d": "u4"})
    expected = function(*(half.double() for half in halves)).to(HALVES[kind])
    assert same_halves(outputs["d"].view(np.uint16), expected.view(torch.int16).numpy().view(np.uint16), kind)


@pytest.mark.parametrize("kind", HALVES)
def test_half_minimum_prefers_the_number(kind):
    a = torch.tensor([1.0, float("nan")] * LANES).to(HALVES[kind])
    b = torch.tensor([2.0, 3.0] * LANES).to(HALVES[kind])
    inputs = {n: half.view(torch.int16).numpy().view(np.uint32) for n, half in zip("ab", (a, b), strict=True)}
    outputs, _ = run_lanes(f"min.{kind}x2 d, a, b;", inputs, {"d": "u4"})
    expected = torch.tensor([1.0, 3.0] * LANES).to(HALVES[kind]).view(torch.int16).numpy().view(np.uint16)
    assert (outputs["d"].view(np.uint16) == expected).all()
