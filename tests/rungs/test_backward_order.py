"""Backward rungs that add in one order, on the emulator: they give the same bits each time, whatever else there is."""

import dataclasses

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
        (WIDE, {"seqlens_q": (70, 130), "seqlens_k": (70, 130), "causal": True, "head_dim": 256, "num_heads": 2}),
        (
            NINETY_SIX,
            {"seqlens_q": (9, 130), "seqlens_k": (20, 200), "head_dim": 192, "num_heads": 4, "num_heads_k": 2},
        ),
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


def gradients(rung, task, tensors):
    """Without looking for races, which other tests do."""
    tensors.poison()
    on_emulator(translate(rung, rung.config_for(task), "sm_90a"), task, tensors, race=False)
    return tensors.dq, tensors.dk, tensors.dv


CALLED = pytest.mark.parametrize(
    ("rung", "sizes"),
    [(TILE_LATE, {"head_dim": 64}), (WIDE, {"head_dim": 256}), (NINETY_SIX, {"head_dim": 192, "head_dim_v": 128})],
    ids=["20", "21", "22"],
)


@CALLED
def test_a_rows_bits_do_not_depend_on_others(rung, sizes):
    """In one head of one sequence each fifth row stays as it is, and so do its keys; a group of another sequence stays
    whole; all else is drawn anew."""
    usual = {"batch": 2, "seqlen_q": 150, "seqlen_k": 210, "num_heads": 4, "num_heads_k": 2, "causal": True}
    task = problem(**usual, **sizes, **SAME_BITS)
    before, after = make_inputs(task), make_inputs(dataclasses.replace(task, seed=1))
    for name in ("q", "o", "dout"):
        old, new = before.by_name[name], after.by_name[name]
        new[0, ::5, 0], new[1, :, 2:] = old[0, ::5, 0], old[1, :, 2:]
    for name in "kv":
        old, new = before.by_name[name], after.by_name[name]
        new[0, :, 0], new[1, :, 1] = old[0, :, 0], old[1, :, 1]
    after.lse[0, 0, ::5], after.lse[1, 2:] = before.lse[0, 0, ::5], before.lse[1, 2:]
    was, now = (gradients(rung, task, each) for each in (before, after))
    assert torch.equal(was[0][0, ::5, 0], now[0][0, ::5, 0])
    assert not torch.equal(was[0][0, 1::5, 0], now[0][0, 1::5, 0])
    for old, new, first in zip(was, now, (2, 1, 1), strict=True):
        assert torch.equal(old[1, :, first:], new[1, :, first:])


@CALLED
def test_a_sequences_bits_are_those_it_has_alone(rung, sizes):
    """Packed behind others, whose lengths are no whole tiles, and beside other heads."""
    bounds = {"window_left": 70, **sizes, **SAME_BITS}
    alone = problem(seqlens_q=(100,), seqlens_k=(140,), num_heads=2, num_heads_k=1, **bounds)
    among = problem(seqlens_q=(7, 0, 100, 20), seqlens_k=(100, 3, 140, 9), num_heads=4, num_heads_k=2, **bounds)
    one, many = make_inputs(alone), make_inputs(among)
    rows, keys = (slice(7, 107), slice(2, 4)), (slice(103, 243), slice(1, 2))
    places = dict.fromkeys(("q", "o", "dout"), rows) | dict.fromkeys("kv", keys)
    for name, place in places.items():
        many.by_name[name][0][place] = one.by_name[name][0]
    many.lse[2:, 7:107] = one.lse
    for name, found, gradient in zip("qkv", gradients(rung, alone, one), gradients(rung, among, many), strict=True):
        assert torch.equal(gradient[0][places[name]], found[0])


@pytest.mark.parametrize("rung", [LAST, ANY], ids=lambda rung: rung.name)
def test_additions_in_any_order_are_found(rung):
    """By two tiles of keys, in a kernel in which none waits for its turn."""
    task = problem(seqlen_q=64, seqlen_k=256)
    module = translate(rung, rung.config_for(task), "sm_90a" if rung in HOPPER else "sm_80")
    on_emulator(module, task, make_inputs(task))
    task = problem(seqlen_q=64, seqlen_k=256, **SAME_BITS)
    with pytest.raises(RaceError, match="race on global memory: tensor workspace dq_sum"):
        on_emulator(module, task, make_inputs(task))
