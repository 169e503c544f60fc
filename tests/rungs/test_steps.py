"""Scores that stay for some keys and then jump, up or down: rungs of each softmax beside a plain FlashAttention-2."""

import math

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flashladder.common import catalog
from flashladder.common.problem.problem import DTYPES
from flashladder.common.runtime.execute import on_emulator
from flashladder.tests.support.designed import drawn_by, missed_of_each
from flashladder.tests.support.rung_table import built

pytestmark = pytest.mark.slow

JUMPS = st.one_of(*(st.integers(-64 * most, 64 * most) for most in (3, 12, 45))).map(lambda n: n / 64)  # in log2


def steps_along(cuts, jumps):
    """Scores that jump at each cut, and stay between."""

    def design(sketch):
        heights = sum((sketch.key >= cut) * jump for cut, jump in zip(cuts, jumps, strict=True)) + 0.0 * sketch.key
        sketch.add(sketch.near(1), heights * math.log(2))

    return design


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rung", ["18", "24", "36", "37"])
@settings(max_examples=2, phases=[Phase.generate])  # to make an example smaller takes minutes
@given(data=st.data())
def test_any_steps_along_the_keys(rung, dtype, data):
    """Other steps in every sequence of a batch."""
    keys, drawn_steps = 384, []
    for _ in range(8):
        cuts = data.draw(st.lists(st.integers(1, keys - 1), max_size=5, unique=True).map(sorted))
        drawn_steps.append((cuts, data.draw(st.lists(JUMPS, min_size=len(cuts), max_size=len(cuts)))))
    designs = [steps_along(*steps) for steps in drawn_steps]
    problem, tensors = drawn_by(designs, seqlen_q=128, seqlen_k=keys, dtype=dtype)
    on_emulator(built(catalog.find(rung), problem), problem, tensors, race=False)
    for steps, missed in zip(drawn_steps, missed_of_each(problem, tensors), strict=True):
        assert missed == (), steps
