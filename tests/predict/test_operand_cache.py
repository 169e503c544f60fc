"""Rung 40's idea, in machine code: each FFMA of a softmax takes m from the operand cache, wherever ptxas has put it."""

import itertools

import pytest

from flashladder.common import catalog
from flashladder.common.compiler import BuildRequest, build
from flashladder.common.compiler.sass import read

pytestmark = pytest.mark.slow

M_IS_KEPT = 1 << 2  # of an instruction's operands the third: m of S * unit - m


def kept(rung, **fields):
    """Of the main loop's FFMA that subtract an m, the share that ask the operand cache to keep it."""
    version = catalog.find(rung)
    (artifact,) = build([BuildRequest(version, version.config(dtype="bf16", **fields), "sm_90a")])
    ffma = [each for each in read(artifact).loop if each.opcode == "FFMA" and each.operands[3].startswith("-")]
    return sum(bool(instruction.control.reuse & M_IS_KEPT) for instruction in ffma) / len(ffma)


LAST = "column_of_ones"
BEFORE = (
    *("row_by_row", "half_block", "from_the_end", "across_tiles", "bounded", "packed_sequences"),
    *("scheduler_warp", "place_of_q"),
)
KINDS = [{"head_dim": head_dim, "causal": causal} for head_dim in (64, 128) for causal in (False, True)]
CASES = [*((LAST, kind) for kind in KINDS), *zip(BEFORE, itertools.cycle(KINDS), strict=False)]


@pytest.mark.parametrize(("rung", "kind"), CASES, ids=str)
def test_m_is_kept(rung, kind):
    """The last rung has a second way for far rows, where an addition stands before each FFMA: a quarter of them."""
    assert kept(rung, **kind) > (0.7 if rung == LAST else 0.9)


def test_elements_in_turns_keep_it_by_luck():
    """What the page of rung 40 says of those below."""
    four = {"head_dim": 64, "causal": True, "block_m": 256, "block_n": 64, "q_in_registers": False, "num_stages": 4}
    assert kept("next_q", head_dim=128, causal=False) > 0.8
    assert kept("next_q", **four, q_stages=1) > 0.8
    assert kept("next_q", **four, q_stages=2) < 0.2
    assert kept("shorter_turn", head_dim=128, causal=False) < 0.2
