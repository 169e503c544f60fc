"""Rungs 48 and 49 take P with an m that may lag behind the scores: rows on both sides of each limit of P."""

import itertools

import pytest
import torch
from test_stale_maximum import BLOCK, rising

from flashladder.common import catalog
from flashladder.common.compiler import translate
from flashladder.common.problem.problem import DTYPES
from flashladder.common.runtime.execute import on_emulator
from flashladder.tests.support.designed import drawn_by, missed_of_each

pytestmark = pytest.mark.slow

# In log2, how far a score may pass the first block's before m is raised, before P is computed again, and before P is
# infinite.
LIMITS = {"bf16": (63, 122, 190), "fp16": (16, 60, 128)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rung", "head_dim"), [("48", 64), ("48", 128), ("49", 96), ("49", 192), ("49", 256)])
@pytest.mark.in_turn
def test_rows_on_both_sides_of_each_limit(rung, head_dim, dtype):
    """At one key and at a whole block."""
    heights = (1, 300, 1500, *(limit + beside for limit in LIMITS[dtype] for beside in (-3, -1, -0.05, 0.05)))
    cases = list(itertools.product(heights, (True, False)))
    designs = [rising(*case) for case in cases]
    version = catalog.find(rung)
    runs = []
    for lse in (True, False):
        problem, tensors = drawn_by(designs, seqlen_q=64, seqlen_k=5 * BLOCK, head_dim=head_dim, dtype=dtype, lse=lse)
        on_emulator(translate(version, version.config_for(problem), "sm_90a"), problem, tensors, race=False)
        runs.append((problem, tensors))
    for case, missed in zip(cases, missed_of_each(*runs[0]), strict=True):
        assert missed == (), case
    assert torch.equal(runs[0][1].o, runs[1][1].o), "a sum that passes a limit, where no P does, changes nothing"
