"""Attention as a function: right on whatever tensors a model has, or refused; and torch can see through it."""

import re

import pytest
import torch

import flashladder
from flashladder.common import attention as public
from flashladder.common import catalog
from flashladder.common.attention import _forward, attention
from flashladder.common.errors import ConfigError, UnsupportedProblemError
from flashladder.common.problem import Problem, expect, make_inputs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def qkv(problem, device):
    tensors = make_inputs(problem, device)
    return tensors, (tensors.q, tensors.k, tensors.v)


@pytest.mark.parametrize(
    "problem",
    [
        Problem(seqlen_q=70, seqlen_k=100, num_heads=4, num_heads_k=2, head_dim=64, causal=True, dtype="fp16"),
        Problem(batch=2, seqlen_q=33, head_dim=96, layout="bhsd", softmax_scale=0.5),
        Problem(seqlen_q=40, seqlen_k=10, head_dim=64, causal=True, layout="padded"),
    ],
    ids=lambda problem: problem.name,
)
def test_it_is_attention(problem, device):
    tensors, inputs = qkv(problem, device)
    scale = problem.softmax_scale if problem.softmax_scale == 0.5 else None
    o, lse = attention(*inputs, causal=problem.causal, softmax_scale=scale, return_lse=True)
    expected = expect(problem, tensors)
    assert (o.shape, o.dtype, lse.dtype) == (tensors.q.shape, tensors.q.dtype, torch.float32)
    assert (o - expected.exact["o"]).abs().max() <= expected.tolerances["o"]
    torch.testing.assert_close(lse.double(), expected.exact["lse"].double(), rtol=0, atol=expected.tolerances["lse"])
    assert torch.equal(attention(*inputs, causal=problem.causal, softmax_scale=scale), o), "without the log-sum-exp"


def test_no_log_sum_exp_is_summed_that_is_not_returned(device):
    _, inputs = qkv(Problem(seqlen_q=48, head_dim=64), device)
    configs = []

    def noted(artifact, problem, tensors, **options):
        configs.append((problem.lse, artifact.config.lse, "lse" in tensors.by_name))
        return run(artifact, problem, tensors, **options)

    name = "on_gpu" if device == "cuda" else "on_emulator"
    run = getattr(public, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(public, name, noted)
        attention(*inputs)
        _, lse = attention(*inputs, return_lse=True)
    assert configs == [(False, False, False), (True, True, True)]
    assert lse.isfinite().all()


def test_any_rung_that_takes_the_problem(device):
    problem = Problem(seqlen_q=128, num_heads=2)
    tensors, inputs = qkv(problem, device)
    o = flashladder.attention(*inputs, version="02")
    expected = expect(problem, tensors)
    assert (o - expected.exact["o"]).abs().max() <= expected.tolerances["o"]


def test_torch_sees_through_it(device):
    """Its schema and its shapes are what torch.compile needs, which then takes a model in one piece."""
    _, inputs = qkv(Problem(seqlen_q=48, seqlen_k=64, num_heads=2, num_heads_k=1, head_dim=64), device)
    checks = ("test_schema", "test_faketensor")
    for return_lse in (False, True):
        torch.library.opcheck(_forward, (*inputs, True, 0.125, "general", return_lse), test_utils=checks)

    def model(q, k, v):
        o, lse = attention(q, k, v, return_lse=True)
        return attention(q * 2, k, v, causal=True).transpose(1, 2) + 1, o, lse + 1

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, compiled(*inputs), model(*inputs)))


def test_what_it_cannot_do_is_said(device):
    _, (q, k, v) = qkv(Problem(seqlen_q=64, head_dim=64), device)
    for arguments, options, words in (
        ((q, k, v.detach().requires_grad_()), {}, "want a gradient, and kernels compute none"),
        ((q.float(), k, v), {}, "q is torch.float32; kernels take torch.bfloat16, torch.float16"),
        ((q[0], k, v), {}, r"q has shape \(64, 1, 64\); it should be \(batch, seqlen, heads, head_dim\)"),
        ((q, k, v[:, :32]), {}, r"v is \(1, 32, 1, 64\) .*; with the other tensors it is \(1, 64, 1, 64\)"),
        ((q[..., :40], k[..., :40], v[..., :40]), {}, "takes head_dim 64, 96, 128, 256, not 40"),
        ((q, k, v), {"version": "16"}, "nearest rung that takes the problem is"),
        ((q, k, v), {"softmax_scale": -1.0}, "softmax_scale=-1.0"),
    ):
        with pytest.raises(UnsupportedProblemError, match=words):
            attention(*arguments, **options)
    with pytest.raises(ConfigError, match=re.escape("no version 99; there are 00_minimal")):
        attention(q, k, v, version="99")


def test_the_default_takes_what_models_have():
    from flashladder.common.attention import DEFAULT

    for name in (DEFAULT, "any_attention"):
        supports = catalog.find(name).supports
        assert (supports.causal, supports.gqa, supports.seqlen_q, supports.seqlen_k) == (True, True, "any", "any")


def test_heads_without_columns_are_refused():
    with pytest.raises(UnsupportedProblemError, match="head_dim=0: must be at least 1"):
        attention(*(torch.zeros(1, 4, 2, 0, dtype=torch.bfloat16) for _ in range(3)))


def test_nothing_else_is_in_the_package():
    with pytest.raises(AttributeError, match="module 'flashladder' has no attribute 'atention'"):
        flashladder.atention  # noqa: B018
