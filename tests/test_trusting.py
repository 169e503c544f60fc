"""Rung 37 computes P before it knows a maximum: rows on both sides of each limit that its sums are held against."""

import math

import pytest
import torch

from flashladder.common import catalog
from flashladder.common.accuracy import deviation, yardstick
from flashladder.common.build.compile import build_one
from flashladder.common.families.sketch import Sketch, heads_first
from flashladder.common.problem import DTYPES, Problem, make_inputs
from flashladder.common.run.execute import on_emulator

BLOCK = 128  # keys
# In log2, what a score passes those before it by. A lane sums 32 P of a row, so that its limits are 5 less for whole
# blocks: 2^10 (P of fp16), 2^120 (what can be brought down again) and 2^128 (fp32).
LIMITS = (10, 120, 128)
BESIDE = [limit - whole + beside for limit in LIMITS for whole in (0, 5) for beside in (-0.05, 0.05)]
HEIGHTS = (4, 16, 124, 126, 200, 1500, *BESIDE)


def rising(head_dim, dtype, one_key):
    """A sequence for each height; a third of the rows rise. The last block is taken first: 0; then the height, at one
    key or at all; 3 more, which a warp that looks for maxima lets pass; 6 more, which it does not; and 0."""
    problem = Problem(batch=len(HEIGHTS), seqlen_q=128, seqlen_k=5 * BLOCK, head_dim=head_dim, dtype=dtype)
    tensors = make_inputs(problem)
    for i, height in enumerate(HEIGHTS):
        inputs = [x[i : i + 1] for x in (tensors.q, tensors.k, tensors.v)]
        sketch = Sketch(inputs[0], inputs[1], problem.softmax_scale, torch.Generator().manual_seed(i))
        block, rows = sketch.behind // BLOCK, sketch.row % 3 == 0
        first = (block == 1) & (sketch.behind % BLOCK == 77) if one_key else block == 1
        heights = height * first + (height + 3) * (block == 2) + (height + 6) * (block == 3)
        sketch.add(rows * torch.where(sketch.row % 2 == 0, 1.0, sketch.near(1)), heights.double() * math.log(2))
        for tensor, made in zip(inputs, (sketch.q, sketch.k, sketch.v), strict=True):
            heads_first(tensor).copy_(made)
    return problem, tensors


@pytest.mark.parametrize("one_key", [True, False], ids=["one key", "a block"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_on_both_sides_of_each_limit(head_dim, dtype, one_key):
    problem, tensors = rising(head_dim, dtype, one_key)
    version = catalog.find("no_maxima")
    on_emulator(build_one(version, version.config_for(problem), "sm_90a"), problem, tensors)
    truths, (o, lse) = deviation.exact(problem, tensors).sequences(), yardstick.run(problem, tensors)
    for i, (height, truth) in enumerate(zip(HEIGHTS, truths, strict=True)):
        theirs, ours = (
            deviation.compare(truth, x[i : i + 1], y[i : i + 1]) for x, y in ((o, lse), (tensors.o, tensors.lse))
        )
        missed = deviation.bars(truth, theirs, dtype, problem.seqlen_k, False).missed(ours)
        assert missed == (), (height, theirs, ours)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_reaches_its_own_rows_alone(value):
    """A row of Q of NaN or infinities is NaN. Its warp never trusts m, which rounds its other rows otherwise."""
    problem = Problem(seqlen_q=128, seqlen_k=5 * BLOCK, head_dim=128)
    version = catalog.find("no_maxima")
    artifact = build_one(version, version.config_for(problem), "sm_90a")
    clean, tensors = make_inputs(problem), make_inputs(problem)
    tensors.q[:, 5] = value
    for each in (clean, tensors):
        on_emulator(artifact, problem, each)
    others = [row for row in range(problem.seqlen_q) if row != 5]
    assert tensors.o[:, 5].isnan().all()
    torch.testing.assert_close(tensors.o[:, others], clean.o[:, others], rtol=0.01, atol=0.002)
