"""The anchored softmax of rungs 18 to 24: what is done again when scores outgrow their anchor, and what is not."""

import math

import pytest
import torch

from flashladder.common import catalog
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.tests.support.rung_table import emulated

pytestmark = pytest.mark.slow

WOVEN = catalog.find("24")
# Every block that a P left the range in, once more, and the one in which all warps know.
GROWTHS = pytest.mark.parametrize(
    ("dtype", "growth", "lost"), [("bf16", 4, False), ("bf16", 400, True), ("fp16", 400, False)]
)


def growing(problem, growth):
    """Scores that grow towards the first key, from which blocks are taken last: they move the anchor, or leave it."""
    tensors = make_inputs(problem)
    tensors.k.copy_(tensors.k * torch.linspace(growth, 0.1, 512).reshape(1, 512, 1, 1))
    tensors.q.abs_()
    tensors.k[:, :256].abs_()
    return tensors


@GROWTHS
@pytest.mark.parametrize("rung", ["18", "19", "20", "21", "22"])
def test_blocks_of_a_jump_are_computed_twice(rung, dtype, growth, lost):
    """A jump in one block is told of in the next, then all begins anew with the first of both: three times at most."""
    problem = Problem(seqlen_q=128, seqlen_k=512, dtype=dtype)
    _, report = emulated(catalog.find(rung), problem, growing(problem, growth))
    once = (4 * problem.head_dim + 2 * 8) * 128 * 512  # with the sum of P, eight columns alike
    assert report.mma_flops == once * (8 + 3 * 2 * lost) / 8


@GROWTHS
@pytest.mark.parametrize(("rung", "causal"), [("23", False), ("24", False), ("24", True)])
def test_the_same_of_general_rungs(rung, dtype, growth, lost, causal):
    problem = Problem(seqlen_q=128, seqlen_k=512, dtype=dtype, causal=causal)
    _, report = emulated(catalog.find(rung), problem, growing(problem, growth), block_m=128, block_n=64)
    skipped = 32 * (32 + 64 + 96) if causal else 0  # a warp leaves out the parts of 32 keys of which it sees nothing
    again = 3 * 2 * 64 * 128 if lost else 0
    assert report.mma_flops == (4 * problem.head_dim + 2 * 8) * (128 * 512 - skipped + again)


def test_what_has_left_the_range_is_found_where_its_weights_are_dropped():
    """Then O has no infinity that would tell; the sum of all weights has one."""
    problem = Problem(seqlen_q=128, seqlen_k=512, dropout_p=0.99)
    emulated(WOVEN, problem, growing(problem, 400), block_m=128, block_n=64)


@pytest.mark.parametrize("rung", ["18", "21", "24"])
def test_a_sum_that_has_left_the_range_is_found_where_v_is_small(rung):
    """Weights of 2^126 and V of 2^-20: O is finite, and the sum of 128 such weights is not."""
    problem = Problem(seqlen_q=128, seqlen_k=512, softmax_scale=math.log(2))
    tensors = make_inputs(problem)
    tensors.q.zero_()
    tensors.q[..., 0] = 1
    tensors.k[..., 0] = 0
    tensors.k[:, 128:256, :, 0] = 126
    tensors.v.mul_(2**-20)
    emulated(catalog.find(rung), problem, tensors)


@pytest.mark.parametrize("dtype", WOVEN.supports.dtype)
def test_a_long_plateau_above_the_anchor(dtype):
    """Every later key scores alike, and above the first block: many like weights, each with its full precision."""
    rises = torch.tensor([4.0, 7.0, 12.0])
    problem = Problem(batch=3, seqlen_q=64, seqlen_k=1600, head_dim=64, dtype=dtype, softmax_scale=1.0)
    tensors = make_inputs(problem)
    tensors.q.zero_()
    tensors.q[..., 0] = 1
    tensors.k[:, :-64] *= 0.05
    tensors.k[:, :-64, :, 0] += rises.reshape(3, 1, 1)
    tensors.k[:, -64:, :, 0] = 0
    tensors.v.copy_(tensors.v.abs() + 1)
    emulated(WOVEN, problem, tensors)
