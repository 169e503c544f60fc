"""Backward rungs that add in one order, on the emulator: they give the same bits each time."""

import pytest
import torch

from flashladder.common.compiler import translate
from flashladder.common.emulator import launch as emulation
from flashladder.common.emulator.errors import RaceError
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.runtime import execute
from flashladder.common.runtime.execute import on_emulator
from flashladder.tests.support.backward_rungs import (
    ANY,
    HOPPER,
    IN_ORDER,
    LAST,
    NINETY_SIX,
    SAME_BITS,
    TILE_LATE,
    WIDE,
    emulated,
    problem,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("rung", "sizes"),
    [
        (IN_ORDER, {"seqlen_q": 70, "seqlen_k": 300, "dtype": "fp16", "head_dim": 128}),
        (IN_ORDER, {"seqlen_q": 140, "seqlen_k": 300, "causal": True, "num_heads": 2, "num_heads_k": 1}),
        (TILE_LATE, {"seqlen_q": 250, "seqlen_k": 300, "window_left": 150, "window_right": 20}),
        (TILE_LATE, {"seqlens_q": (70, 0, 130), "seqlens_k": (20, 10, 300), "causal": True, "head_dim": 128}),
        (WIDE, {"seqlen_q": 70, "seqlen_k": 130, "head_dim": 192}),
        (NINETY_SIX, {"seqlen_q": 200, "seqlen_k": 250, "head_dim": 192, "head_dim_v": 128, "causal": True}),
        (ANY, {"seqlen_q": 100, "seqlen_k": 300, "dtype": "fp16", "num_heads": 2, "num_heads_k": 1}),
        (ANY, {"seqlen_q": 250, "seqlen_k": 300, "window_left": 150, "window_right": 20}),
        (ANY, {"seqlens_q": (70, 0, 130), "seqlens_k": (20, 10, 300), "causal": True}),
    ],
    ids=str,
)
def test_the_bits_are_the_same_in_whatever_order_ctas_run(rung, sizes, monkeypatch):
    """All at once, begun in the order of the launch, and from the last one on; and one by one, as on one SM: nobody
    waits for a CTA that is launched later. The race detector finds additions in no order."""
    task = problem(**sizes, **SAME_BITS)
    found = []
    in_order = emulation.ordered_ctas
    for backwards, together in ((False, 132), (True, 132), (False, 1)):
        monkeypatch.setattr(
            emulation, "ordered_ctas", lambda *grid, step=-1 if backwards else 1: in_order(*grid)[::step].copy()
        )
        monkeypatch.setattr(execute, "CHUNK", together)
        tensors = make_inputs(task)
        emulated(rung, task, tensors)
        found.append([tensors.by_name[name].clone() for name in ("dq", "dk", "dv")])
    assert all(all(map(torch.equal, found[0], each)) for each in found[1:])


@pytest.mark.parametrize(
    ("rung", "sizes"),
    [(TILE_LATE, {}), (WIDE, {"head_dim": 192, "head_dim_v": 128})],
    ids=["20", "21"],
)
def test_nobody_waits_for_a_later_cta_to_begin_a_sum(rung, sizes, monkeypatch):
    """CTAs one by one, in the order of the launch; dQ of some tiles begins with keys amid a window."""
    monkeypatch.setattr(execute, "CHUNK", 1)
    emulated(rung, problem(seqlen_q=200, seqlen_k=330, window_left=100, window_right=10, **sizes))


@pytest.mark.parametrize("rung", [LAST, ANY], ids=lambda rung: rung.name)
def test_additions_in_any_order_are_found(rung):
    """By two tiles of keys, in a kernel in which none waits for its turn."""
    task = problem(seqlen_q=64, seqlen_k=256)
    module = translate(rung, rung.config_for(task), "sm_90a" if rung in HOPPER else "sm_80")
    on_emulator(module, task, make_inputs(task))
    task = problem(seqlen_q=64, seqlen_k=256, **SAME_BITS)
    with pytest.raises(RaceError, match="race on global memory: tensor workspace dq_sum"):
        on_emulator(module, task, make_inputs(task))
