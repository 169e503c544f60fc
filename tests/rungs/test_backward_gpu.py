"""The backward ladder on a real GPU (`pytest -m gpu`): real sizes, 2,000 random problems, every family of inputs."""

import random

import pytest
import torch

from flashladder.common.compiler import build_one
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.families import FAMILIES
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_gpu
from flashladder.common.runtime.gpu import device_arch
from flashladder.tests.support.backward_rounding import bounded_by_flash_attention
from flashladder.tests.support.backward_rungs import (
    ANY,
    HOPPER,
    IN_ORDER,
    LADDER,
    LAST,
    NINETY_SIX,
    RUNGS,
    SAME_BITS,
    TILE_LATE,
    WIDE,
)
from flashladder.tests.support.right_on_gpu import require_right_on_a_gpu
from flashladder.tests.support.rung_table import draw

pytestmark = pytest.mark.gpu


WIDTHS = [(256, 256), (256, 128), (192, 192), (192, 128), (160, 72), (224, 200)]  # of Q and K, and of V
WIDE_RUNGS = [(rung, *each) for rung in (WIDE, NINETY_SIX) for each in WIDTHS if each[0] <= max(rung.supports.head_dim)]
CALLED = (ANY, TILE_LATE, WIDE, NINETY_SIX)  # what calls launch


def problem(**sizes):
    return Problem(**sizes, operation=LADDER)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 4, "num_heads": 8, "seqlen_q": 2000},
        {"batch": 4, "num_heads": 16, "num_heads_k": 8, "seqlen_q": 2000},
        {"num_heads": 16, "num_heads_k": 4, "seqlens_q": (2000, 0, 33, 900), "seqlens_k": (1500, 10, 33, 2000)},
    ],
    ids=["dense", "groups", "packed"],
)
@pytest.mark.parametrize(
    ("rung", "head_dim"),
    [
        *((rung, head_dim) for rung in (IN_ORDER, ANY, TILE_LATE) for head_dim in (64, 128)),
        *((TILE_LATE, 96), (WIDE, 192), (WIDE, 256), (NINETY_SIX, 192)),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_hundred_runs_give_the_same_bits(rung, causal, head_dim, sizes):
    task = problem(**sizes, head_dim=head_dim, causal=causal, **SAME_BITS)
    if not rung.runs_on(device_arch()) or not rung.takes(task):
        pytest.skip(f"{rung.name} needs another GPU, or takes no packed sequences")
    tensors = make_inputs(task, "cuda")
    launch = on_gpu(build_one(rung, rung.config_for(task), device_arch()), task, tensors)
    found = []
    for _ in range(100):
        tensors.poison()
        launch()
        found.append([tensors.by_name[name].clone() for name in ("dq", "dk", "dv")])
    verify(expect(task, tensors), tensors.outputs, tensors.buffers).require(rung.name)
    assert all(torch.equal(a, b) for each in found[1:] for a, b in zip(each, found[0], strict=True))


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_each_rung_is_right_on_a_gpu(rung, head_dim):
    require_right_on_a_gpu(rung, problem(batch=2, num_heads=4, seqlen_q=1024, head_dim=head_dim))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (113, 203), (203, 113), (1023, 1025), (4000, 4000)])
def test_the_last_rung_is_right_on_a_gpu(head_dim, causal, seqlen_q, seqlen_k):
    sizes = {"num_heads": 4, "num_heads_k": 2, "head_dim": head_dim, "causal": causal, "layout": "padded"}
    require_right_on_a_gpu(ANY, problem(batch=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **sizes))


@pytest.mark.parametrize("rung", HOPPER, ids=lambda rung: rung.name)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (113, 203), (203, 113), (1023, 1025), (4000, 4000)])
def test_hopper_rungs_are_right_on_a_gpu(rung, head_dim, causal, seqlen_q, seqlen_k):
    sizes = {"num_heads": 4, "num_heads_k": 2, "head_dim": head_dim, "causal": causal, "layout": "padded"}
    require_right_on_a_gpu(rung, problem(batch=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **sizes))


@pytest.mark.parametrize(
    ("rung", "head_dim", "head_dim_v"), WIDE_RUNGS, ids=lambda value: getattr(value, "name", str(value))
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (113, 203), (203, 113), (1023, 1025), (4000, 4000)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_wide_heads_are_right_on_a_gpu(rung, head_dim, head_dim_v, causal, seqlen_q, seqlen_k, dtype):
    sizes = {"num_heads": 4, "num_heads_k": 2, "head_dim": head_dim, "head_dim_v": head_dim_v, "causal": causal}
    sizes |= {"batch": 2, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "dtype": dtype, "layout": "padded"}
    require_right_on_a_gpu(rung, problem(**sizes))


@pytest.mark.parametrize(
    ("rung", "head_dim", "head_dim_v"),
    [
        *((ANY, each, each) for each in (64, 96, 128, 256)),
        *((TILE_LATE, *each) for each in ((64, 64), (96, 96), (128, 128), (72, 40))),
        *WIDE_RUNGS,
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
@pytest.mark.parametrize(
    "more",
    [
        {"seqlen_q": 2000, "window_left": 300, "window_right": 100},
        {"seqlen_q": 1000, "seqlen_k": 1500, "causal": True, "window_left": 300},
        {"seqlen_q": 1000, "softcap": 20.0},
        {"seqlen_q": 1000, "causal": True, "alibi": True},
        {"seqlen_q": 1000, "options": {"dlse": True}},
        {"seqlen_q": 1000, "causal": True, "options": {"wants_dq": False}},
        {"seqlen_q": 1000, "causal": True, "options": {"wants_dkv": False}},
        {"seqlens_q": (700, 0, 33, 1, 1200), "seqlens_k": (200, 100, 33, 0, 2000), "causal": True},
        {"seqlens_q": (700, 64), "window_left": 100, "softcap": 20.0, "alibi": True, "options": {"dlse": True}},
        {"seqlen_q": 1000, "causal": True, "window_left": 300, "softcap": 20.0, "alibi": True, "dropout_p": 0.2},
        {"seqlens_q": (700, 64), "causal": True, "window_left": 100, **SAME_BITS},
        {"seqlens_q": (700, 0, 33, 1, 1200), "seqlens_k": (200, 100, 33, 0, 2000), "causal": True, "dropout_p": 0.2},
    ],
    ids=str,
)
def test_any_attention_on_a_gpu(rung, head_dim, head_dim_v, more):
    sizes = {"num_heads": 4, "num_heads_k": 2, "head_dim": head_dim, "head_dim_v": head_dim_v}
    require_right_on_a_gpu(rung, problem(**{**sizes, **more}))


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize(
    "more",
    [
        {"seqlen_q": 2000, "batch": 2},
        {"seqlen_q": 300, "seqlen_k": 1500, "window_left": 200},
        {"seqlens_q": (700, 0, 33, 1, 1200), "seqlens_k": (200, 100, 33, 0, 2000)},
        {"seqlen_q": 1000, "dropout_p": 0.2, "options": {"wants_dq": False}},
    ],
    ids=str,
)
def test_each_head_has_its_ctas_on_a_gpu(head_dim, more):
    """As calls launch groups under a causal mask."""
    task = problem(num_heads=16, num_heads_k=2, head_dim=head_dim, causal=True, **more)
    require_right_on_a_gpu(TILE_LATE, task, split_heads=True)


# Compiled once each, for 2,000 problems.
EVERYTHING = dict.fromkeys(("causal", "window", "softcap", "packed"), True)
KINDS = [
    (rung, {"head_dim": head_dim, "dtype": dtype, **more})
    for rung in (*CALLED, LAST, IN_ORDER)
    for head_dim in rung.supports.head_dim
    for dtype in ("bf16", "fp16")
    for more in ([{"causal": False}, EVERYTHING] if rung in CALLED else [{"causal": head_dim == 64}])
]


def name_of(kind):
    """d64-bf16-causal-window"""
    return "-".join([f"d{kind['head_dim']}", kind["dtype"], *(name for name, value in kind.items() if value is True)])


@pytest.mark.parametrize(("rung", "kind"), KINDS, ids=[f"{rung.number}-{name_of(kind)}" for rung, kind in KINDS])
def test_many_random_problems(rung, kind):
    """By FlashAttention's rule, or at most twice as far from exact gradients as its own roundings are."""
    rng = random.Random(name_of(kind))
    for _ in range(2000 // len(KINDS) + 1):
        task = draw(rng, longest=900, operation=LADDER, lse=True, **kind)
        tensors = make_inputs(task, "cuda")
        require_right_on_a_gpu(rung, task, tensors, bounded_by_flash_attention(task, tensors), runs=1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("rung", "head_dim"),
    [*((rung, head_dim) for rung in (LAST, ANY, TILE_LATE) for head_dim in (64, 128)), (WIDE, 256), (NINETY_SIX, 192)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_every_family_of_inputs(rung, head_dim, family):
    """By FlashAttention's rule, or at most twice as far from exact gradients as its own roundings are."""
    sizes = {"num_heads": 2, "seqlen_q": 1000, "head_dim": head_dim, "causal": head_dim == 64}
    for dtype in ("bf16", "fp16"):
        task = problem(**sizes, dtype=dtype, family=family)
        tensors = make_inputs(task, "cuda")
        require_right_on_a_gpu(rung, task, tensors, bounded_by_flash_attention(task, tensors), runs=1)
