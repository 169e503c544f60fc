"""What a row of O and its log-sum-exp are does not depend on other rows, heads and sequences, bit for bit."""

import dataclasses
from functools import partial

import pytest
import torch

from flashladder.common import catalog
from flashladder.common.compiler import build_one, translate
from flashladder.common.problem.inputs import Tensors, make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import gpu
from flashladder.common.runtime.execute import on_emulator, on_gpu

RUNGS = ("48", "49", "50")
KEPT = 15  # of each 16 rows one stays as it is
# In nats: m stays, moves and is lost, each in rows of its own.
SPREADS = (1, 60, 400)
APART = {"head_dim": 192, "head_dim_v": 128, "dtype": "bf16", "causal": True, "sinks": True}
KINDS = [
    *(
        (rung, {"head_dim": head_dim, "dtype": dtype, "causal": causal})
        for rung in RUNGS
        for head_dim in catalog.find(rung).supports.head_dim
        for dtype in catalog.find(rung).supports.dtype
        for causal in (False, True)
    ),
    *((rung, APART) for rung in ("48", "49")),
]
EMULATED = partial(on_emulator, race=False)  # test_rungs.py looks for races


def inputs(problem: Problem, device: str) -> Tensors:
    """Rows whose scores have different spreads."""
    tensors = make_inputs(problem, device)
    for index, spread in enumerate(SPREADS):
        tensors.q[:, index :: len(SPREADS)] *= spread
    return tensors


def change(tensors: Tensors, problem: Problem) -> None:
    """Every row of Q but those that stay, later keys than theirs where a mask hides them, and all other heads and
    sequences."""
    generator = torch.Generator(device="cpu").manual_seed(1)
    others = torch.arange(problem.seqlen_q) % 16 != KEPT
    for tensor in (tensors.q, tensors.k, tensors.v):
        noise = (torch.randn(tensor.shape, generator=generator) * 100).to(tensor)
        tensor[1:] = noise[1:]
        tensor[:, :, 1:] = noise[:, :, 1:]
        if tensor is tensors.q:
            tensor[0, others, 0] = noise[0, others, 0]
    tensors.q[0, ::7, 0] = tensors.q[0, ::7, 0].where(~others[::7, None].to(tensors.q.device), torch.nan)


def kept(tensors: Tensors) -> list[torch.Tensor]:
    return [tensors.o[0, KEPT::16, 0].clone(), tensors.lse[0, 0, KEPT::16].clone()]


def require_independence(rung, problem: Problem, device: str, arch: str, run, make=build_one) -> None:
    """Runs the problem twice, and compares what stays."""
    version = catalog.find(rung)
    module = make(version, version.config_for(problem), arch)
    tensors = inputs(problem, device)
    run(module, problem, tensors)
    before = kept(tensors)
    change(tensors, problem)
    tensors.poison()
    run(module, problem, tensors)
    for was, now in zip(before, kept(tensors), strict=True):
        assert torch.isfinite(was).all()
        torch.testing.assert_close(now, was, rtol=0, atol=0)


@pytest.mark.parametrize(("rung", "kind"), [*KINDS[::3], *KINDS[-2:]], ids=str)
@pytest.mark.slow
def test_rows_do_not_depend_on_others(rung, kind):
    problem = Problem(batch=2, num_heads=2, seqlen_q=64, seqlen_k=280, **kind)
    require_independence(rung, problem, "cpu", "sm_90a", EMULATED, translate)


@pytest.mark.slow
def test_a_batch_does_not_change_a_sequence():
    """Nor do more heads, which give other CTAs other tiles."""
    one = Problem(seqlen_q=70, seqlen_k=230, head_dim=64, causal=True)
    many = dataclasses.replace(one, batch=2, num_heads=3, num_heads_k=3)
    tensors = {problem: inputs(problem, "cpu") for problem in (one, many)}
    for name in ("q", "k", "v"):
        getattr(tensors[many], name)[1, :, 2] = getattr(tensors[one], name)[0, :, 0]
    rung = catalog.find("49")
    for problem, each in tensors.items():
        EMULATED(translate(rung, rung.config_for(problem), "sm_90a"), problem, each)
    torch.testing.assert_close(tensors[many].o[1, :, 2], tensors[one].o[0, :, 0], rtol=0, atol=0)
    torch.testing.assert_close(tensors[many].lse[1, 2], tensors[one].lse[0, 0], rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(("rung", "kind"), KINDS, ids=str)
@pytest.mark.parametrize("lengths", [(512, 512), (2048, 4096)], ids=str)
def test_rows_do_not_depend_on_others_on_a_gpu(rung, kind, lengths):
    if not catalog.find(rung).runs_on(gpu.device_arch()):
        pytest.skip(f"{rung} has no instructions for {gpu.device_arch()}")
    problem = Problem(batch=3, num_heads=4, seqlen_q=lengths[0], seqlen_k=lengths[1], **kind)
    require_independence(rung, problem, "cuda", gpu.device_arch(), lambda *each: on_gpu(*each)())
