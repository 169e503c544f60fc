"""Sliding windows and softcaps of the general rung on the emulator, under the race detector."""

import math
from functools import partial

import pytest
import test_general_hopper
import torch
from general_problems import GENERAL
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_problems import ARCH, SMALL, emulated

from flashladder.common import catalog
from flashladder.common.compiler import build_one
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.check import expect
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_emulator

PACKED = catalog.find("column_of_ones")
SIDES = (None, 0, 1, 15, 16, 31, 32, 33, 63, 64, 65, 100)


def hidden_by_definition(seqlen_q, seqlen_k, left, right):
    """As flash-attn documents it, word for word."""
    return [
        [
            not (
                (left is None or j >= i + seqlen_k - seqlen_q - left)
                and (right is None or j <= i + seqlen_k - seqlen_q + right)
            )
            for j in range(seqlen_k)
        ]
        for i in range(seqlen_q)
    ]


@pytest.mark.parametrize(("left", "right"), [(2, None), (None, 1), (0, 0), (3, 2)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 9), (9, 5), (6, 6)])
def test_the_exact_answer_has_flash_attentions_window(seqlen_q, seqlen_k, left, right):
    problem = Problem(seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=16, window_left=left, window_right=right)
    tensors = make_inputs(problem)
    hidden = torch.tensor(hidden_by_definition(seqlen_q, seqlen_k, left, right))
    scores = (tensors.q[0, :, 0].double() @ tensors.k[0, :, 0].double().T / 4).masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1).nan_to_num(0)
    exact = expect(problem, tensors).exact
    torch.testing.assert_close(exact["o"][0, :, 0], weights @ tensors.v[0, :, 0].double())
    torch.testing.assert_close(exact["lse"][0, 0], scores.logsumexp(-1))
    assert problem.flops == 4 * 16 * (~hidden).sum()


@settings(max_examples=10, deadline=None)
@given(*(st.integers(1, 200),) * 2, *(st.sampled_from(SIDES),) * 2, *(st.booleans(),) * 2)
def test_any_window(seqlen_q, seqlen_k, left, right, causal, square):
    lengths = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_q if square else seqlen_k}
    bounds = {"causal": causal, "window_left": left, "window_right": None if causal else right}
    emulated(Problem(**lengths, **bounds, head_dim=64))


@pytest.mark.parametrize("seqlen_q", [64, 256])
def test_blocks_beyond_the_window_are_not_computed(seqlen_q):
    """The work grows with the window, not with the sequence: a row's is its window, its tile's, and two blocks more."""
    tensors, report = emulated(
        Problem(seqlen_q=seqlen_q, seqlen_k=1024, head_dim=64, causal=True, window_left=95), block_m=64, block_n=32
    )
    assert report.mma_flops <= seqlen_q * (96 + 64 + 2 * 32) * (4 * 64 + 2 * 8)
    assert tensors.o.isfinite().all()


def test_what_is_beyond_the_window_may_be_anything():
    problem = Problem(seqlen_q=100, seqlen_k=200, head_dim=64, window_left=40, window_right=20)
    clean, _ = emulated(problem)
    tensors = make_inputs(problem)
    unseen = 60 // SMALL["block_n"] * SMALL["block_n"]  # row 0 sees the keys from 60 on; a block is read whole
    tensors.k[:, :60] = math.nan
    tensors.v[:, :unseen] = math.nan
    artifact = build_one(GENERAL, GENERAL.config_for(problem, **SMALL), ARCH)
    on_emulator(artifact, problem, tensors)
    assert torch.equal(tensors.o, clean.o)


@pytest.mark.parametrize("growth", [4, 400])
def test_scores_that_outgrow_their_anchor(growth):
    """The blocks between the ends of the window are anchored: a row may be lost there, and the CTA begins anew."""
    problem = Problem(seqlen_q=64, seqlen_k=640, head_dim=64, window_left=400, window_right=30)
    tensors = make_inputs(problem)
    tensors.k.copy_(tensors.k * torch.linspace(growth, 0.1, 640).reshape(1, 640, 1, 1))
    tensors.q.abs_()
    tensors.k[:, :400].abs_()
    emulated(problem, tensors)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("softcap", [1.0, 30.0, 500.0])
@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_softcap(softcap, dtype, spread):
    """Of scores of 1 and of 8 nats; the log-sum-exp as precise as without."""
    problem = Problem(seqlen_q=70, seqlen_k=150, head_dim=64, dtype=dtype, softcap=softcap, softmax_scale=spread / 8)
    emulated(problem)


OF_EACH = pytest.mark.parametrize("run", [emulated, partial(test_general_hopper.emulated, PACKED)], ids=["24", "48"])


@OF_EACH
@pytest.mark.parametrize("bounds", [{"window_left": 2**32}, {"window_left": 5, "window_right": 2**31 - 1}])
def test_a_window_may_be_wider_than_any_tensor(run, bounds):
    run(Problem(seqlen_q=64, head_dim=64, **bounds))


@OF_EACH
@pytest.mark.parametrize(("softcap", "scale"), [(1000.0, 2.0**127), (1e-20, 1e22)])
def test_a_score_of_zero_is_none_however_steep_the_softcap_is(run, softcap, scale):
    problem = Problem(seqlen_q=64, head_dim=64, softcap=softcap, softmax_scale=scale)
    tensors = make_inputs(problem)
    tensors.k[:, 3:5] = 0
    run(problem, tensors)


def test_packed_with_all_of_it():
    bounds = {"window_left": 20, "causal": True, "softcap": 20.0}
    seqlens = {"seqlens_q": (70, 0, 33, 1, 130), "seqlens_k": (20, 10, 33, 0, 200)}
    emulated(Problem(operation="packed", num_heads=2, num_heads_k=1, head_dim=64, **seqlens, **bounds))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_left": -1}, "window_left=-1: must be an integer of at least 0, or None for all keys"),
        ({"window_right": 2.5}, "window_right=2.5: must be an integer of at least 0, or None for all keys"),
        ({"window_right": 3, "causal": True}, "window_right=3: with causal=true no row sees a later key"),
        ({"softcap": -1.0}, "softcap=-1.0: must be a positive number up to 1000, or 0 for none"),
        ({"softcap": math.nan}, "softcap=nan: must be a positive number"),
    ],
)
def test_what_is_no_problem_is_refused(options, message):
    with pytest.raises(UnsupportedProblemError, match=message):
        Problem(**options)


@pytest.mark.parametrize(("options", "lack"), [({"window_left": 3}, "sliding window"), ({"softcap": 2.0}, "softcap")])
def test_rungs_without_it_say_so(options, lack):
    for name, able in {"16": "24_woven_general", "23": "24_woven_general", "34": "44_bounded"}.items():
        with pytest.raises(UnsupportedProblemError, match=f"has no {lack}; the nearest rung .* is {able}"):
            catalog.find(name).config_for(Problem(**options))
    with pytest.raises(UnsupportedProblemError, match=f"has no {lack}"):
        catalog.find_implementation("py_fa2").config_for(Problem(dtype="bf16", **options))
