"""Rung 40's idea, in machine code: each FFMA of a softmax takes m from the operand cache, wherever ptxas has put it."""

import pytest

from flashladder.common import catalog
from flashladder.common.compiler import BuildRequest, build
from flashladder.common.compiler.sass import read

M_IS_KEPT = 1 << 2  # of an instruction's operands the third: m of S * unit - m


def kept(rung, **fields):
    """The share of the main loop's FFMA that ask the operand cache to keep their m."""
    version = catalog.find(rung)
    (artifact,) = build([BuildRequest(version, version.config(dtype="bf16", **fields), "sm_90a")])
    ffma = [instruction for instruction in read(artifact).loop if instruction.opcode == "FFMA"]
    return sum(bool(instruction.control.reuse & M_IS_KEPT) for instruction in ffma) / len(ffma)


@pytest.mark.parametrize(
    "rung",
    [
        *("row_by_row", "half_block", "from_the_end", "across_tiles", "bounded", "packed_sequences"),
        *("scheduler_warp", "place_of_q", "column_of_ones"),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_m_is_kept(rung, head_dim, causal):
    assert kept(rung, head_dim=head_dim, causal=causal) > 0.9


def test_elements_in_turns_keep_it_by_luck():
    """What the page of rung 40 says of those below."""
    four = {"head_dim": 64, "causal": True, "block_m": 256, "block_n": 64, "q_in_registers": False, "num_stages": 4}
    assert kept("next_q", head_dim=128, causal=False) > 0.8
    assert kept("next_q", **four, q_stages=1) > 0.8
    assert kept("next_q", **four, q_stages=2) < 0.2
    assert kept("shorter_turn", head_dim=128, causal=False) < 0.2
