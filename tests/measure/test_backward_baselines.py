"""Official kernels of the backward pass without a GPU: stand-ins compute what they are told, by the textbook."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from flashladder.common.measure import baselines
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem

SIZES = {"num_heads": 4, "num_heads_k": 2, "head_dim": 64, "softmax_scale": 0.2}
CASES = {
    "groups, not square": {"seqlen_q": 20, "seqlen_k": 33, "causal": True, "batch": 2},
    "window": {"seqlen_q": 40, "causal": True, "window_left": 9},
    "both sides": {"seqlen_q": 40, "window_left": 9, "window_right": 2, "layout": "padded"},
    "packed": {"seqlens_q": (7, 0, 25), "seqlens_k": (9, 3, 25), "causal": True},
    "packed, in a window": {"seqlens_q": (7, 30), "causal": True, "window_left": 5},
    "same bits": {"seqlen_q": 20, "options": {"deterministic": True}},
    "- softcap, gradient of the log-sum-exp": {"seqlen_q": 20, "softcap": 1.5, "options": {"dlse": True}},
    "- head_dim_v": {"seqlen_q": 20, "head_dim": 192, "head_dim_v": 128},
}


def task(**sizes):
    return Problem(operation="backward", **(SIZES | sizes))


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


def by_textbook(q, k, v, dout, *, scale, causal, left, right, softcap=0.0, dlse=None, starts=None):
    """In fp64, of (batch, rows, heads, columns); packed, with where sequences of q and of k begin, without a batch."""
    made = [torch.zeros_like(x) for x in (q, k, v)]
    if starts is None:
        places = [((number,), (number,), (number,)) for number in range(len(q))]
    else:
        ends_q, ends_k = (pairwise(each.tolist()) for each in starts)
        places = [
            ((slice(*rows),), (slice(*keys),), (slice(None), slice(*rows)))
            for rows, keys in zip(ends_q, ends_k, strict=True)
        ]
    for rows, keys, sums in places:
        q1, do = (x[rows].double().transpose(0, 1) for x in (q, dout))
        k1, v1 = (x[keys].double().transpose(0, 1).repeat_interleave(q.shape[-2] // k.shape[-2], 0) for x in (k, v))
        scores, slope = scale * q1 @ k1.mT, 1.0
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
            slope = 1 - (scores / softcap) ** 2
        behind = torch.arange(k1.shape[1]) - torch.arange(q1.shape[1])[:, None] - k1.shape[1] + q1.shape[1]
        hidden = behind > (0 if causal else 9999 if right is None else right)
        hidden |= behind < -(9999 if left is None else left)
        P, dP = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(), do @ v1.mT
        dS = slope * P * (dP - (P * dP).sum(-1, keepdim=True) + (0 if dlse is None else dlse[sums][..., None]))
        for x, at, gradient in zip(made, (rows, keys, keys), (dS @ k1, dS.mT @ q1, P.mT @ do), strict=True):
            of_heads = gradient.unflatten(0, (x.shape[-2], -1)).sum(1) * (1 if x is made[2] else scale)
            x[at] = of_heads.transpose(0, 1).to(x.dtype)
    return tuple(made)


@pytest.fixture
def told():
    """What the stand-ins were told of modes."""
    return []


@pytest.fixture
def stand_ins(monkeypatch, told, on_hopper):
    """torch's operator on the CPU, and FlashAttention-4's function."""

    def of_torch(dout, q, k, v, o, lse, cu_q, cu_k, max_q, max_k, dropout_p, causal, *_, scale, **window):
        told.append((torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory))
        left, right = window.get("window_size_left"), window.get("window_size_right")
        starts = None if cu_q is None else (cu_q, cu_k)
        assert starts is None or (max_q, max_k) == tuple(int(each.diff().max()) for each in starts)
        assert lse.shape == (q.shape[1], q.shape[0]) if starts else (q.shape[0], q.shape[2], q.shape[1])
        return by_textbook(q, k, v, dout, scale=scale, causal=causal, left=left, right=right, starts=starts)

    def of_fa4(q, k, v, o, dout, lse, softmax_scale, causal, **more):
        told.append((more.pop("deterministic", False), True))
        left, right = (more.pop(f"window_size_{side}", None) for side in ("left", "right"))
        starts = (more.pop("cu_seqlens_q"), more.pop("cu_seqlens_k")) if "cu_seqlens_q" in more else None
        lengths = [more.pop(name, None) for name in ("max_seqlen_q", "max_seqlen_k")]
        assert starts is None or lengths == [int(each.diff().max()) for each in starts]
        masks = {"causal": causal, "left": left, "right": right}
        return by_textbook(q, k, v, dout, scale=softmax_scale, **masks, starts=starts, **more)

    fa4 = baselines.find("fa4", "backward")
    usual = type(fa4)._import
    fake = SimpleNamespace(_flash_attn_bwd=of_fa4)
    monkeypatch.setattr(type(fa4), "_import", lambda each: fake if each.name == "fa4" else usual(each))
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_backward", of_torch, "CPU")
        yield


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["fa2", "fa4"])
def test_it_is_told_what_the_problem_is(name, case, stand_ins, told):
    problem, baseline = task(**CASES[case]), baselines.find(name, "backward")
    if case.startswith("-") and name == "fa2":
        assert baseline.refusal(problem) is not None
        return
    tensors = make_inputs(problem)
    found = baseline.prepare(problem, tensors)()
    verify(expect(problem, tensors), found._asdict()).require(name)
    assert told == [(problem.deterministic, not (problem.deterministic and name == "fa2"))]
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_torchs_own_operators_take_the_arguments(on_hopper):
    """Meta tensors go through schemas and shapes, and compute nothing."""
    for name, sizes in (("fa2", {}), ("fa2", CASES["packed"]), ("cudnn", {}), ("cudnn", CASES["- head_dim_v"])):
        problem = task(**{"seqlen_q": 20, **sizes} if "seqlens_q" not in sizes else sizes)
        tensors = make_inputs(problem, "meta")
        found = baselines.find(name, "backward").prepare(problem, tensors)()
        assert [x.shape for x in found] == [tensors.by_name[x].shape for x in "qkv"]


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("fa2", CASES["- softcap, gradient of the log-sum-exp"], "is asked for no softcap here"),
        ("fa2", {"seqlen_q": 20, "options": {"dlse": True}}, "takes no gradient of the log-sum-exp"),
        ("fa2", {"seqlen_q": 20, "options": {"dsinks": True}}, "takes no gradient of sinks"),
        ("fa4", {"seqlen_q": 20, "options": {"dsinks": True}}, "takes no gradient of sinks"),
        ("fa2", CASES["- head_dim_v"], "takes no head_dim_v of 128 with a head_dim of 192"),
        ("cudnn", CASES["packed"], "takes no packed sequences"),
        ("cudnn", CASES["same bits"], "takes no promise of the same bits each time"),
        ("cudnn", CASES["window"], "is asked for no sliding window here"),
        ("cudnn", CASES["groups, not square"], "takes no causal mask with seqlen_q != seqlen_k"),
        ("cudnn", CASES["- head_dim_v"], None),
    ],
)
def test_what_it_does_not_take(on_hopper, name, sizes, message):
    refusal = baselines.find(name, "backward").refusal(task(**sizes))
    assert refusal is None if message is None else message in refusal


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["plain", *CASES])
@pytest.mark.parametrize("name", baselines.of("backward"))
def test_on_a_gpu_it_is_right(name, case):
    problem, baseline = task(**CASES.get(case, {"seqlen_q": 200})), baselines.find(name, "backward")
    if reason := baseline.missing() or baseline.refusal(problem):
        pytest.skip(reason)
    tensors = make_inputs(problem, "cuda")
    verify(expect(problem, tensors), baseline.prepare(problem, tensors)()._asdict()).require(name)
