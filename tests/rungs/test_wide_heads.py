"""Heads of 257 to 512 columns: rung 50, and rung 24 on other GPUs."""

import pytest
import torch

from flashladder.common import catalog
from flashladder.common.api import attention
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.operations.forward import V_IS_K
from flashladder.tests.support.rung_table import emulated, masked, packed

RUNG, GENERAL = catalog.find("50"), catalog.find("24")
WIDE = {"head_dim": 512, "num_heads": 2, "num_heads_k": 1}
ALL_BOUNDS = {"window_left": 40, "softcap": 20.0, "alibi": True, "sinks": True}
NARROWER = {"head_dim": 264, "dtype": "fp16", "layout": "padded"}


def test_v_that_is_k_is_loaded_once():
    """A tile of Q, and three blocks of K and V: three tiles, or six."""
    loads = {}
    for layout in ("bshd", V_IS_K):
        _, report = emulated(RUNG, masked(seqlen_q=64, seqlen_k=180, head_dim=512, layout=layout))
        loads[layout] = sum(n for opcode, n in report.instructions.items() if opcode.startswith("cp.async.bulk.tensor"))
    panels = 8  # of a tile
    assert loads == {"bshd": 7 * panels, V_IS_K: 4 * panels}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["bshd", V_IS_K])
def test_tile_after_tile(layout):
    """Of more blocks than the ring has places, and of none: rows that see no key."""
    for seqlen_q, seqlen_k in ((200, 330), (200, 70), (70, 1)):
        problem = masked(**WIDE, seqlen_q=seqlen_q, seqlen_k=seqlen_k, layout=layout)
        emulated(RUNG, problem, num_sms=1)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, ALL_BOUNDS | NARROWER | {"head_dim_v": 40}], ids=["plain", "all bounds"])
def test_packed_sequences(options):
    problem = packed((70, 0, 33, 170), (20, 10, 33, 300), **WIDE | options)
    emulated(RUNG, problem, num_sms=1)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["climbing", "jump_rows", "huge_scores"])
def test_scores_that_climb_and_scores_far_away(family):
    for dtype in ("bf16", "fp16"):
        emulated(RUNG, masked(head_dim=512, seqlen_q=64, seqlen_k=300, family=family, dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize(
    "bounds", [{"window_left": 70}, ALL_BOUNDS | NARROWER, {"causal": False, "lse": False}], ids=str
)
def test_bounds(bounds):
    emulated(RUNG, masked(**WIDE | {"seqlen_q": 90, "seqlen_k": 200} | bounds), num_sms=1)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["of sm_80", "of Hopper"])
def test_two_ctas_share_the_columns_of_o_before_hopper(gpu):
    small = {"block_m": 32, "num_warps": 2, "block_n": 16, "edge_n": 16, "copy_pieces": 1}
    config = small if gpu == "of sm_80" else {"block_n": 32}
    emulated(GENERAL, masked(**WIDE, seqlen_q=100, seqlen_k=200), **config)
    emulated(GENERAL, masked(**WIDE | NARROWER | ALL_BOUNDS, dropout_p=0.3, seqlen_q=70, seqlen_k=120), **config)
    emulated(
        GENERAL, packed((70, 0, 33, 130), (20, 10, 33, 200), **WIDE | {"head_dim": 504, "head_dim_v": 40}), **config
    )


def test_the_call_takes_them_and_names_what_it_does_not():
    q, k = (torch.randn(1, rows, heads, 300, dtype=torch.bfloat16) for rows, heads in ((3, 2), (20, 1)))
    o, lse = attention(q, k, k, causal=True, return_lse=True)
    scores = torch.einsum("qhd,kd->hqk", q[0].double(), k[0, :, 0].double()) * 300**-0.5
    scores.masked_fill_(torch.ones(3, 20).triu(18).bool(), -torch.inf)
    torch.testing.assert_close(lse[0].double(), scores.logsumexp(-1), atol=1e-4, rtol=0)
    exact = (scores.softmax(-1) @ k[0, :, 0].double()).transpose(0, 1)
    torch.testing.assert_close(o[0].double(), exact, atol=0.02, rtol=0)
    with pytest.raises(
        UnsupportedProblemError, match=r"want a gradient, .* with head_dim=256 .* would: call it in torch.no_grad"
    ):
        attention(q.requires_grad_(), k, k)
    with pytest.raises(UnsupportedProblemError, match=r"not 600; .* with head_dim=512 .* would"):
        attention(*(torch.zeros(1, 4, 1, 600, dtype=torch.bfloat16) for _ in range(3)))
