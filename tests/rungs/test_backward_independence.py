"""Bits of a gradient's row do not depend on other rows, heads and sequences, where a call asks for the same bits."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from flashladder.common.compiler import build_one, translate
from flashladder.common.problem.inputs import Tensors, make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_emulator, on_gpu
from flashladder.common.runtime.gpu import device_arch
from flashladder.tests.support.backward_rungs import NINETY_SIX, SAME_BITS, TILE_LATE, WIDE, problem

KINDS = [
    *((TILE_LATE, {"head_dim": head_dim}, {}) for head_dim in (64, 96, 128)),
    (WIDE, {"head_dim": 256}, {}),
    (NINETY_SIX, {"head_dim": 192}, {}),
    (NINETY_SIX, {"head_dim": 192, "head_dim_v": 128}, {"num_stages": 3}),
]
SMALL = [
    {"batch": 2, "seqlen_q": 70, "seqlen_k": 100},
    {"seqlens_q": (20, 70, 0, 9), "seqlens_k": (30, 100, 10, 9)},
]
LARGE = [
    {"batch": 3, "seqlen_q": 1000, "seqlen_k": 1500},
    {"seqlens_q": (300, 1000, 0, 700), "seqlens_k": (200, 1500, 10, 700)},
]
NUMBER = 1  # of the sequence that stays
HEADS = 4
HEADS_K = {"groups": 2, "heads": 4}  # tiles of keys are added from the first ones on, and from the last ones
OUTPUTS = ("dq", "dk", "dv")


def spans(task: Problem) -> tuple[int, range, range]:
    """The place of the sequence that stays: in the batch, and its rows and keys."""
    if not task.packed:
        return NUMBER, range(task.seqlen_q), range(task.seqlen_k)
    rows, keys = ([0, *itertools.accumulate(lengths)] for lengths in (task.seqlens_q, task.seqlens_k))
    return 0, range(rows[NUMBER], rows[NUMBER + 1]), range(keys[NUMBER], keys[NUMBER + 1])


def group_of(task: Problem) -> int:
    """Heads that share the first one of K and V, which stay with it."""
    return task.num_heads // task.num_heads_k


def changed(tensor: torch.Tensor, batch: int, stays: range, heads: int) -> torch.Tensor:
    """Like a tensor of (batch, rows, heads, ...), with other numbers but in what stays of the first heads; and NaN."""
    generator = torch.Generator().manual_seed(1)
    other = (torch.randn(tensor.shape, generator=generator) * 3).to(tensor)
    other[:, ::7] = torch.nan
    other[batch, [*stays], :heads] = tensor[batch, [*stays], :heads]
    return other


def rows_first(task: Problem, tensors: Tensors) -> torch.Tensor:
    """LSE as (batch, rows, heads)."""
    return tensors.lse.T[None] if task.packed else tensors.lse.transpose(1, 2)


def change(task: Problem, tensors: Tensors, rows: range, keys: range) -> None:
    """All inputs, but for these rows and keys of the first heads."""
    batch, *_ = spans(task)
    group = group_of(task)
    for name in ("q", "o", "dout"):
        tensors.by_name[name].copy_(changed(tensors.by_name[name], batch, rows, group))
    lse = rows_first(task, tensors)
    lse.copy_(changed(lse, batch, rows, group))
    for name in ("k", "v"):
        tensors.by_name[name].copy_(changed(tensors.by_name[name], batch, keys, 1))


def require_independence(task: Problem, device: str, run) -> None:
    """dQ of some rows is the same whatever other rows are; and so are dK and dV of some keys, with other keys."""
    batch, rows, keys = spans(task)
    some = slice(15, None, 16)
    for kept_rows, kept_keys, outputs in ((rows[some], keys, ("dq",)), (rows, keys[some], ("dk", "dv"))):
        tensors = make_inputs(task, device)
        run(tensors)
        before = {name: tensors.by_name[name].clone() for name in outputs}
        change(task, tensors, kept_rows, kept_keys)
        tensors.poison()
        run(tensors)
        for name, was in before.items():
            stays, heads = (kept_rows, group_of(task)) if name == "dq" else (kept_keys, 1)
            now, place = tensors.by_name[name], (batch, [*stays], slice(heads))
            assert torch.isfinite(was[place]).all()
            torch.testing.assert_close(now[place], was[place], rtol=0, atol=0)
            assert not torch.equal(now[batch], was[batch]), "nothing was changed"


def require_the_same_alone(task: Problem, sizes, device: str, runner) -> None:
    """A sequence's gradients are those that it has without the others."""
    alone = {name: (lengths[NUMBER],) if task.packed else lengths for name, lengths in sizes.items()} | {"batch": 1}
    single = replace(task, seqlen_q=0, seqlen_k=0, **alone) if task.packed else replace(task, **alone)
    among, apart = make_inputs(task, device), make_inputs(single, device)
    batch, rows, keys = spans(task)
    places = {name: (batch, [*(keys if name[-1] in "kv" else rows)]) for name in ("q", "k", "v", "o", "dout", *OUTPUTS)}
    for name in ("q", "k", "v", "o", "dout"):
        apart.by_name[name][0].copy_(among.by_name[name][places[name]])
    rows_first(single, apart)[0].copy_(rows_first(task, among)[batch, [*rows]])
    for each, tensors in ((task, among), (single, apart)):
        runner(each)(tensors)
    for name in OUTPUTS:
        torch.testing.assert_close(apart.by_name[name][0], among.by_name[name][places[name]], rtol=0, atol=0)


def require_independence_of(kind, sizes, heads_k, causal, device, arch, make, launch) -> None:
    rung, shape, config = kind
    task = problem(**shape, **sizes, num_heads=HEADS, num_heads_k=heads_k, causal=causal, **SAME_BITS)

    def runner(each: Problem):
        module = make(rung, rung.config_for(each, **config), arch)
        return lambda tensors: launch(module, each, tensors)

    require_independence(task, device, runner(task))
    require_the_same_alone(task, sizes, device, runner)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes", "heads_k"),
    [(KINDS[0], SMALL[1], 2), (KINDS[3], SMALL[0], 4), (KINDS[5], SMALL[1], 4)],
    ids=["20", "21", "22"],
)
def test_rows_do_not_depend_on_others(kind, sizes, heads_k):
    launch = partial(on_emulator, race=False)
    require_independence_of(kind, sizes, heads_k, True, "cpu", "sm_90a", translate, launch)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join([kind[0].number, *map(str, kind[1].values())]))
@pytest.mark.parametrize("sizes", LARGE, ids=["dense", "packed"])
@pytest.mark.parametrize("heads_k", HEADS_K.values(), ids=HEADS_K)
@pytest.mark.parametrize("causal", [False, True])
def test_rows_do_not_depend_on_others_on_a_gpu(kind, sizes, heads_k, causal):
    if not kind[0].runs_on(device_arch()):
        pytest.skip(f"{kind[0].name} needs another GPU")
    launch = lambda *each: on_gpu(*each)()  # noqa: E731
    require_independence_of(kind, sizes, heads_k, causal, "cuda", device_arch(), build_one, launch)
