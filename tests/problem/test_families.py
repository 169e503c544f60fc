"""Families of inputs: each suits every shape, and has the scores that it is designed for."""

import math
from dataclasses import replace

import pytest
import torch

from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.families import FAMILIES
from flashladder.common.problem.families.sketch import heads_first
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.operations.forward import attention
from flashladder.common.problem.problem import DTYPES, Problem
from flashladder.common.studies.accuracy import deviation
from flashladder.tests.support.designed import SMALL, drawn


def scores_of(problem, tensors):
    """In nats, (heads, rows, keys)."""
    q, k = heads_first(tensors.q).double(), heads_first(tensors.k).double()
    return problem.softmax_scale * q @ k.repeat_interleave(len(q) // len(k), 0).transpose(1, 2)


def test_normal_inputs_are_what_they_were():
    problem = Problem(batch=2, num_heads=4, num_heads_k=2, seqlen_q=20, head_dim=16, seed=7)
    generator = torch.Generator().manual_seed(7)
    tensors = make_inputs(problem)
    for tensor in (tensors.q, tensors.k, tensors.v):
        assert torch.equal(tensor, torch.randn(tensor.shape, generator=generator).bfloat16())
    assert "family" not in problem.name
    assert replace(problem, family="sinks").name.endswith(",family=sinks")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_suits_every_shape(family, dtype):
    shapes = {"head_dim": 64, "num_heads": 4, "num_heads_k": 2}, {"seqlen_k": 40}
    wide_and_narrow = ({"head_dim": 64, "head_dim_v": columns} for columns in (32, 96))
    for options in (*shapes, *wide_and_narrow, {"layout": "padded"}):
        problem, tensors = drawn(family, dtype=dtype, **options)
        for tensor in (tensors.q, tensors.k, tensors.v):
            assert tensor.isfinite().all()
        assert not any(buffer.damage() for buffer in tensors.buffers)
        exact = deviation.exact(problem, tensors)
        assert exact.values.abs().max() < torch.finfo(DTYPES[dtype]).max


def test_a_family_that_is_none_is_refused():
    with pytest.raises(UnsupportedProblemError, match="family=plateau: must be one of normal, normal_3"):
        Problem(family="plateau")


@pytest.mark.parametrize("scale", [1e-46, 1e-39, 2e38, 1e39])
def test_a_scale_that_fp32_does_not_hold_is_refused(scale):
    with pytest.raises(UnsupportedProblemError, match=r"kernels hold it in fp32, which takes 1\.2e-38 to 1\.7e"):
        Problem(softmax_scale=scale)
    Problem(softmax_scale=1.2e-38)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_are_as_designed(dtype):
    scores = scores_of(*drawn("plateau_4", dtype=dtype))
    assert scores[..., -64:].abs().max() == 0
    assert (scores[..., :-64] - 4.5).abs().max() < 0.031
    jumps = scores_of(*drawn("jump_rows", dtype=dtype))[0, :, 0] / math.log(2)
    below, above = jumps[:80].sort().values.reshape(40, 2).T - torch.arange(1, 41)
    assert (-below).min() > 0.01
    assert (-below).max() < 0.09
    assert above.min() > 0.01
    assert above.max() < 0.09
    counts = (scores_of(*drawn("plateau_sparse", dtype=dtype))[0] > 39).sum(-1)
    assert list(counts.unique()) == [SMALL["seqlen_k"] // 64]
    p = scores_of(*drawn("plateau_rows", dtype=dtype))[0, :, 0].exp()
    rounding = (p - p.to(DTYPES[dtype])) / p.log2().floor().exp2() / torch.finfo(DTYPES[dtype]).eps
    assert list(p.log2().floor().int()) == [1 + row // 16 % 7 for row in range(128)]
    assert (rounding.abs() - 0.4).abs().max() < 0.03
    assert rounding.sign().mean().abs() < 0.5
    for family in ("tiny_scale", "huge_scale", "normal_10"):
        sigma = 10 if family == "normal_10" else 1
        assert scores_of(*drawn(family, dtype=dtype)).std() == pytest.approx(sigma, rel=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["one_hot", "huge_scores"])
def test_one_hot_rows_are_rows_of_v(family, dtype):
    problem, tensors = drawn(family, dtype=dtype)
    o, _ = attention(problem, tensors.by_name, torch.float64)
    chosen = scores_of(problem, tensors)[0].argmax(-1)
    assert torch.equal(o[0, :, 0].to(DTYPES[dtype]), tensors.v[0, chosen, 0])
    assert len(chosen.unique()) == len(chosen)


def test_each_pair_has_its_turn():
    """With as many heads as a tile has columns, every row of a tile meets every column."""
    problem, tensors = drawn("maximum_in_turn", seqlen_q=128, seqlen_k=128, num_heads=128, num_heads_k=1)
    chosen = scores_of(problem, tensors).argmax(-1)
    assert len({(row, int(key)) for of_head in chosen for row, key in enumerate(of_head)}) == 128 * 128
