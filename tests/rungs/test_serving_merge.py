"""serving/00 on the emulator, under the race detector: two sides into one, and many."""

import pytest

from flashladder.common import catalog
from flashladder.common.compiler import translate
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_emulator

RUNG = catalog.find("serving/00")
STACKED = {"stacked": True, "a_rows_first": 1}
KINDS = {
    "two sides": {"layout": "padded", "head_dim": 80},
    "a side of fp32": {"options": {"wide": True, "b_rows_first": 1}, "dtype": "fp16", "head_dim": 512},
    "rows first": {"options": {"a_rows_first": 1}, "layout": "bhsd"},
    "many sides": {"options": STACKED, "seqlen_q": 37},
    "many of fp32": {"options": {**STACKED, "wide": True}, "head_dim": 192},
}


@pytest.mark.parametrize("kind", KINDS)
def test_sides_become_one(kind):
    """NaN of a side without keys is never read."""
    task = Problem(operation="merge", **{"batch": 3, "num_heads": 5, "seqlen_q": 7, "head_dim": 64, **KINDS[kind]})
    tensors = make_inputs(task)
    on_emulator(translate(RUNG, RUNG.config_for(task), "sm_80"), task, tensors)
    verify(expect(task, tensors), tensors.outputs, tensors.buffers).require(kind)
