"""Scores below 7/16 of a softcap by a polynomial, the others by an exponential: a lane decides for each of its rows."""

import pytest
import torch

from flashladder.common import catalog
from flashladder.common.compiler import build_one
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_emulator

pytestmark = pytest.mark.slow
RUNG = catalog.find("49")


def computed(task, tensors):
    config = RUNG.config_for(task, polynomial_tanh=True)
    on_emulator(build_one(RUNG, config, "sm_90a"), task, tensors)
    return tensors


@pytest.mark.parametrize("softcap", [2.0, 30.0], ids=["most are far", "all are near"])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (192, 128)])
def test_it_is_as_exact_as_the_exponential(head_dim, head_dim_v, softcap):
    sizes = {"num_heads": 2, "seqlen_q": 150, "seqlen_k": 200, "head_dim": head_dim, "head_dim_v": head_dim_v}
    task = Problem(**sizes, causal=True, softcap=softcap)
    tensors = make_inputs(task)
    expected = expect(task, tensors)
    computed(task, tensors)
    verify(expected, tensors.outputs, tensors.buffers).require(RUNG.name)
    assert (tensors.lse - expected.exact["lse"]).abs().max() < 4e-6


def test_far_scores_of_a_row_change_no_other_row():
    task = Problem(seqlen_q=70, seqlen_k=200, head_dim=64, softcap=30.0)
    near, far = make_inputs(task), make_inputs(task)
    far.q[:, 8] *= 100
    for tensors in (near, far):
        computed(task, tensors)
    others = [row for row in range(70) if row != 8]
    assert torch.equal(near.o[:, others], far.o[:, others])
    assert torch.equal(near.lse[..., others], far.lse[..., others])
    assert not torch.equal(near.o[:, 8], far.o[:, 8])


def test_keys_that_a_mask_hides_change_no_row():
    task = Problem(seqlen_q=200, seqlen_k=200, head_dim=64, causal=True, softcap=30.0)
    seen, changed = make_inputs(task), make_inputs(task)
    changed.k[:, 100:] *= 100
    for tensors in (seen, changed):
        computed(task, tensors)
    assert torch.equal(seen.o[:, :100], changed.o[:, :100])
    assert torch.equal(seen.lse[..., :100], changed.lse[..., :100])
