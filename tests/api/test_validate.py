"""Numbers of Python, NumPy and torch as arguments: each is taken as the number that it is, or refused by name."""

import enum
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from flashladder import (
    attention,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    flash_mla_with_kvcache,
    packed_attention,
)
from flashladder.common.api import operator, options, validate
from flashladder.common.errors import UnsupportedProblemError
from flashladder.tests.support import fake_cuda


class Two(enum.IntEnum):
    TWO = 2


class Float(float):
    pass


@pytest.mark.parametrize(
    "value",
    [
        *(2, 2.0, Float(2), Two.TWO, Fraction(2), Decimal(2)),
        *(np.float64(2), np.float16(2), np.int8(2), np.array(2), np.array([2.0])),
        *(torch.tensor(2.0), torch.tensor(2), torch.tensor([[2.0]])),
    ],
    ids=repr,
)
def test_a_number_is_a_float(value):
    assert type(found := validate.number("softmax_scale", value)) is float
    assert found == 2.0


@pytest.mark.parametrize("value", [True, np.True_, torch.tensor(True)], ids=repr)
def test_true_is_a_number_and_no_whole_number(value):
    """As in torch's own attention, whose scale may be True; and as its indices may not be NumPy's."""
    assert repr(validate.number("softmax_scale", value)) == "1.0"
    with pytest.raises(UnsupportedProblemError, match=r"num_splits.* is of type .*; it should be a whole number"):
        validate.whole("num_splits", value)


def test_minus_zero_and_what_is_not_finite_stay_so():
    assert math.copysign(1, validate.number("softcap", -0.0)) == -1
    assert math.isnan(validate.number("softcap", np.float32("nan")))
    assert validate.number("softcap", -math.inf) == -math.inf


@pytest.mark.parametrize(
    "value",
    [
        "2",
        b"2",
        np.str_("2"),
        np.array("2"),
        1j,
        np.complex64(1 + 2j),
        torch.tensor(1j),
        np.ones(2),
        torch.ones(2),
        float,
    ],
    ids=repr,
)
def test_what_is_no_real_number_is_refused(value):
    with pytest.raises(UnsupportedProblemError, match=r"softmax_scale.* is of type .*; it should be a number"):
        validate.number("softmax_scale", value)


def test_a_number_beyond_all_floats_is_refused():
    with pytest.raises(UnsupportedProblemError, match="softmax_scale is larger than a floating-point number can be"):
        validate.number("softmax_scale", 10**400)


@pytest.mark.parametrize("value", [2, Two.TWO, np.int64(2), np.uint8(2), np.array(2), torch.tensor(2)], ids=repr)
def test_a_whole_number_is_an_int(value):
    assert type(found := validate.whole("num_splits", value)) is int
    assert found == 2
    assert validate.pair("window", (value, None), None) == (2, None)
    assert validate.pair("window_size", [-1, value], -1) == (-1, 2)
    assert {type(each) for each in validate.pair("window_size", (value, value), -1)} == {int}


@pytest.mark.parametrize("pair", [np.array([5, -1]), torch.tensor([5, -1]), [np.int32(5), torch.tensor(-1)]], ids=repr)
def test_pairs_of_numbers(pair):
    assert validate.pair("window_size", pair, -1) == (5, -1)


@pytest.mark.parametrize(
    "pair",
    [5, (5,), (5, 5, 5), (5, 1.0), (5, True), "50", {5, 6}, np.array([5.0, 1.0]), torch.tensor(5), (5, None)],
    ids=repr,
)
def test_what_is_no_pair_is_refused(pair):
    with pytest.raises(UnsupportedProblemError, match=r"it should be \(left, right\), each a number of keys, or -1"):
        validate.pair("window_size", pair, -1)


@pytest.mark.parametrize("of", [Two, np.int64, np.array, torch.tensor], ids=lambda of: of.__name__)
def test_every_door_takes_them(of, monkeypatch):
    """What kernels are told of a call by numbers of any kind is what they are told by Python's own."""
    driver = fake_cuda.for_attention(monkeypatch)
    q, numbers = torch.zeros(2, 9, 2, 64).bfloat16(), torch.tensor([4, 5]).int()
    starts, flat = torch.tensor([0, 2, 4]).int(), torch.zeros(4, 2, 64).bfloat16()

    def called(two):
        driver.launches.clear()
        attention(q, q, q, window=(two, two), softcap=two, softmax_scale=two)
        flash_attn_func(q, q, q, window_size=(two, two), softcap=two, softmax_scale=two)
        packed_attention(flat, flat, flat, starts, starts, two, two, window=(two, None), softmax_scale=two)
        options = {"window_size": (two, 0), "softcap": two, "softmax_scale": two, "num_splits": two}
        flash_attn_with_kvcache(q[:, :1], q, q, cache_seqlens=numbers, **options)
        return [(launch.function, launch.shape) for launch in driver.launches], seen

    seen, problem_of = [], options.problem_of

    def noting(*given, **others):
        seen.append(made := problem_of(*given, **others))
        return made

    monkeypatch.setattr(options, "problem_of", noting)
    expected, problems = called(2)
    assert all(problem.softmax_scale == 2.0 and type(problem.softmax_scale) is float for problem in problems)
    first = list(problems)
    seen.clear()
    assert called(of(2))[0] == expected
    assert seen == first
    assert [repr(problem) for problem in seen] == [repr(problem) for problem in first], "also of the same types"


def test_under_a_causal_mask_a_window_has_nothing_to_the_right():
    q, starts = torch.randn(9, 1, 64).bfloat16(), torch.tensor([0, 9]).int()
    for call in (
        lambda window: attention(q[None], q[None], q[None], causal=True, window=window),
        lambda window: packed_attention(q, q, q, starts, starts, 9, 9, causal=True, window=window),
    ):
        assert torch.equal(call((5, 3)), call((5, None)))
        with pytest.raises(UnsupportedProblemError, match="window=-1: must be at least 0"):
            call((5, -1))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fp32_is_cast_under_autocast(device, monkeypatch):
    """As torch's own attention has it, which leaves fp64 as it is; so are tensors of 16 bits beside it."""
    if device == "cpu":  # the emulator takes long
        monkeypatch.setattr(operator, "launch", lambda *_, **__: None)
    x, starts = torch.randn(9, 1, 64, device=device), torch.tensor([0, 9], device=device).int()
    cache, latents = torch.zeros(1, 9, 1, 64, device=device), torch.randn(2, 64, 1, 576, device=device).half()
    q, row = x[None].requires_grad_(), latents[:1, :1].float()
    table = {"rotary_cos": torch.ones(9, 32, device=device), "rotary_sin": torch.zeros(9, 32, device=device)}
    lengths, pages = torch.tensor([5], device=device).int(), torch.zeros(1, 1, device=device).int()
    with torch.autocast(device, torch.float16):
        made = [
            attention(q, q.bfloat16(), q),
            packed_attention(x, x, x, starts, starts, 9, 9),
            flash_attn_func(q, q.detach().half(), q),
            flash_attn_varlen_func(x, x, x, starts, starts, 9, 9),
            flash_attn_with_kvcache(
                q.detach(), cache.half(), cache.half(), x[None, :2], x[None, :2], **table, cache_seqlens=lengths
            ),
            flash_mla_with_kvcache(row, latents, pages, lengths, 512)[0],
        ]
        with pytest.raises(UnsupportedProblemError, match=r"q is torch\.float64"):
            attention(q.double(), q.double(), q.double())
        assert attention(q.bfloat16(), q.bfloat16(), q.bfloat16()).dtype == torch.bfloat16
    assert {o.dtype for o in made} == {torch.float16}
    made[0].sum().backward()
    assert q.grad.dtype == torch.float32
    with pytest.raises(UnsupportedProblemError, match=r"q is torch\.float32"):
        attention(q, q, q)


def test_sinks_beyond_what_kernels_hold_are_refused():
    q = torch.zeros(1, 3, 2, 64).bfloat16()
    for value in (3e38, torch.finfo(torch.float32).min):
        with pytest.raises(UnsupportedProblemError, match=r"sinks has -?3.*e\+38: kernels hold them in fp32"):
            attention(q, q, q, sinks=torch.tensor([0.0, value]))
    _, lse = attention(q, q, q, sinks=torch.tensor([-math.inf, 2.3e38]), return_lse=True)
    torch.testing.assert_close(lse[0, :, 0], torch.tensor([math.log(3), 2.3e38]))
