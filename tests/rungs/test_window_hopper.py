"""Sliding windows and softcaps of the Hopper rung that takes them, on the emulator, under the race detector."""

import math
import random

import pytest
import torch
from general_problems import draw
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_problems import draw_bounds
from test_general_hopper import ARCH, emulated, tiles

from flashladder.common import catalog
from flashladder.common.api import attention
from flashladder.common.compiler import build_one
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_emulator

RUNG = catalog.find("column_of_ones")
TILED = ("packed_sequences", "scheduler_warp", "place_of_q", "column_of_ones")
SIDES = (None, 0, 1, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200)


@settings(max_examples=12, deadline=None)
@given(*(st.integers(1, 330),) * 2, *(st.sampled_from(SIDES),) * 2, *(st.booleans(),) * 2)
def test_any_window(seqlen_q, seqlen_k, left, right, causal, square):
    lengths = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_q if square else seqlen_k}
    bounds = {"causal": causal, "window_left": left, "window_right": None if causal else right}
    emulated(RUNG, Problem(**lengths, **bounds, head_dim=64))


@pytest.mark.parametrize("dtype", RUNG.supports.dtype)
@pytest.mark.parametrize("head_dim", RUNG.supports.head_dim)
def test_random_problems_with_bounds(head_dim, dtype):
    """Any lengths, heads, layouts, scales, windows and softcaps."""
    rng = random.Random(f"{head_dim} {dtype}")
    for causal in (False, True):
        bounds = draw_bounds(rng, causal) | {"alibi": False}
        emulated(RUNG, draw(rng, 300, head_dim=head_dim, dtype=dtype, causal=causal, **bounds))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rung", "head_dim", "tile"), list(tiles(*TILED)))
def test_whole_tiles_that_one_cta_computes_one_after_another(rung, head_dim, tile, causal):
    """Each warpgroup has another window of them, and passes blocks at both ends."""
    lengths = {"seqlen_q": 2 * tile["block_m"], "seqlen_k": 2 * tile["block_m"] + 200}
    bounds = {"causal": causal, "window_left": 90, "window_right": None if causal else 40}
    emulated(rung, Problem(num_heads=2, **lengths, head_dim=head_dim, **bounds), **tile, num_sms=1)


@pytest.mark.parametrize("window_left", [0, 64, 200])
def test_tiles_and_rows_that_see_no_key(window_left):
    """The first tiles of all, the first rows of one, and whole warpgroups behind the last row."""
    problem = Problem(num_heads=2, seqlen_q=500, seqlen_k=70, head_dim=64, causal=True, window_left=window_left)
    tensors = emulated(RUNG, problem)
    assert not tensors.o[:, :430].any()
    assert (tensors.lse[:, :, :430] == -math.inf).all()
    assert tensors.lse[:, :, 430:].isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_beyond_the_window_are_neither_brought_nor_multiplied(causal):
    """A tile of 128 rows with 95 keys on each side of a row has 4 blocks of 128 keys at most, of 16 that there are."""
    bounds = {"window_left": 95, "window_right": None if causal else 95}
    problem = Problem(seqlen_q=256, seqlen_k=2048, causal=causal, **bounds)
    tensors = make_inputs(problem)
    config = RUNG.config_for(problem)
    report = on_emulator(build_one(RUNG, config, ARCH), problem, tensors)
    assert report.mma_flops <= 2 * 4 * 128 * (4 * 128) * 128
    whole = Problem(seqlen_q=256, seqlen_k=2048, causal=causal)
    without = on_emulator(build_one(RUNG, RUNG.config_for(whole), ARCH), whole, make_inputs(whole))
    assert report.mma_flops < without.mma_flops / 3


def test_what_is_beyond_the_window_may_be_anything():
    problem = Problem(seqlen_q=100, seqlen_k=600, head_dim=64, window_left=40, window_right=20)
    clean, tensors = emulated(RUNG, problem), make_inputs(problem)
    block_n = RUNG.config_for(problem).block_n
    first = 460  # the first row's position is 500
    tensors.k[:, :first] = math.nan
    tensors.v[:, : first // block_n * block_n] = math.nan
    on_emulator(build_one(RUNG, RUNG.config_for(problem), ARCH), problem, tensors)
    assert torch.equal(tensors.o, clean.o)


@pytest.mark.parametrize("dtype", RUNG.supports.dtype)
@pytest.mark.parametrize("softcap", [1.0, 30.0, 500.0])
@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_softcap(softcap, dtype, spread):
    """Of scores of 1 and of 8 nats; the log-sum-exp as precise as without."""
    emulated(
        RUNG, Problem(seqlen_q=70, seqlen_k=300, head_dim=64, dtype=dtype, softcap=softcap, softmax_scale=spread / 8)
    )


@pytest.mark.parametrize("softcap", [0.0, 900.0])
@pytest.mark.parametrize("dtype", RUNG.supports.dtype)
def test_scores_that_are_lost_are_computed_again_with_their_bounds(dtype, softcap):
    """Amid the window and at both of its ends: from block to block they grow by far more than fp32 can hold."""
    problem = Problem(
        seqlen_q=128, seqlen_k=640, head_dim=64, dtype=dtype, window_left=400, window_right=30, softcap=softcap
    )
    tensors = make_inputs(problem)
    tensors.q.abs_()
    tensors.k.abs_()
    tensors.k.copy_(tensors.k * torch.linspace(200, 0.1, 640).reshape(1, 640, 1, 1))
    emulated(RUNG, problem, tensors)


def test_it_can_be_asked_for_by_name():
    q, k, v = torch.randn(3, 1, 150, 2, 64).bfloat16()
    bounds = {"window": (40, None), "softcap": 20.0}
    expected = attention(q, k, v, causal=True, **bounds)
    torch.testing.assert_close(attention(q, k, v, causal=True, **bounds, version="48"), expected, rtol=0.02, atol=0.02)
