"""Arithmetic of which the second interpreter (test_reference.py) says nothing: approximations, results that PTX leaves
open but a GPU has, and registers that are packed into one."""

import numpy as np
import pytest
import torch
from lanes import run_lanes

LANES = 32


def same(actual, expected):
    """Equal bits, but that any NaN equals any NaN."""
    both_nan = np.isnan(actual) & np.isnan(expected)
    bits = f"u{actual.dtype.itemsize}"
    return bool((both_nan | (actual.view(bits) == expected.astype(actual.dtype).view(bits))).all())


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
    flushed = np.where(np.abs(kept) < 2.0**-126, np.copysign(np.float32(0), kept), kept)
    assert same(outputs["e"], flushed)


def test_nan_becomes_the_canonical_bf16():
    a = np.full(LANES, np.nan, np.float32)
    outputs, _ = run_lanes("cvt.rn.bf16x2.f32 d, a, a;", {"a": a}, {"d": "u4"})
    assert (outputs["d"] == 0x7FFF7FFF).all()


@pytest.mark.parametrize(("name", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_eight_bits_become_f16(name, dtype):
    """All 256 values, in pairs; torch knows them too."""
    for octets in np.arange(256, dtype=np.uint8).reshape(4, 2 * LANES):
        outputs, _ = run_lanes(f"cvt.rn.f16x2.{name}x2 d, a;", {"a": octets.view("u2")}, {"d": "u4"})
        found, expected = outputs["d"].view("f2"), torch.from_numpy(octets).view(dtype).to(torch.float16).numpy()
        assert same(found.astype(np.float32), expected.astype(np.float32))
        assert (outputs["d"].view("u2")[np.isnan(found)] == 0x7FFF).all()


def test_floats_become_eight_bits():
    """Those of e4m3, what lies halfway between them, their neighbours, and what is beyond; torch rounds alike."""
    eights = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (eights[1:] + eights[:-1]) / 2
    near = [between, *(torch.nextafter(between, torch.tensor(to)) for to in (0.0, torch.inf))]
    numbers = torch.cat([eights, *near, torch.tensor([463.9, 464.0, 1e30, torch.inf, 1e-45])])
    numbers = torch.cat([numbers, -numbers, torch.tensor([torch.nan])])
    padded = torch.nn.functional.pad(numbers, (0, -len(numbers) % LANES)).view(-1, LANES)
    expected = padded.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    for row, wanted in zip(padded.numpy(), expected, strict=True):
        outputs, _ = run_lanes("cvt.rn.satfinite.e4m3x2.f32 d, a, b;", {"a": row, "b": row[::-1].copy()}, {"d": "u2"})
        assert (outputs["d"] >> 8 == wanted).all()
        assert (outputs["d"] & 255 == wanted[::-1]).all()


def test_integer_division_by_zero():
    a = np.array([0, 7, 1 << 31, 0xFFFFFFFF] * 8, np.uint32)
    code = "mov.u32 z, 0; div.s32 d, a, z; div.u32 e, a, z; rem.s32 f, a, z; rem.u32 g, a, z;"
    outputs, _ = run_lanes(code, {"a": a}, dict.fromkeys("defg", "u4"), registers=".reg .b32 z;")
    for name, expected in zip("defg", (0xFFFFFFFF, 0xFFFFFFFF, a, a), strict=True):
        assert (outputs[name] == expected).all()


@pytest.mark.parametrize(("name", "combine"), [("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)])
def test_comparison_combined_with_a_predicate(name, combine):
    a = np.arange(LANES, dtype=np.uint32)
    c = a % 3 == 0
    outputs, _ = run_lanes(
        f"setp.lt.{name}.u32 p|q, a, 16, !c;", {"a": a, "c": c}, {"p": "?", "q": "?"}
    )  # fmt: skip
    assert (outputs["p"] == combine(a < 16, ~c)).all()
    assert (outputs["q"] == combine(a >= 16, ~c)).all()


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
