"""Scores so far from 0 that fp32 has no fractions there, and then no whole numbers; up to where products overflow."""

import pytest
import torch

from flashladder.common import catalog
from flashladder.common.compiler import build_one
from flashladder.common.problem.check import expect
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import DTYPES, Problem
from flashladder.common.runtime import gpu
from flashladder.common.runtime.execute import on_emulator, on_gpu
from flashladder.tests.support.rung_table import built

KEYS, EARLY, LATE = 320, 5, 317
KEY = torch.arange(KEYS)
# A score of each key, of 8 bits, in units. Rungs for Hopper take blocks from the last one to the first.
DESIGNS = {
    "all alike": torch.full((KEYS,), 1.3671875),
    "all alike, below": torch.full((KEYS,), -1.3671875),
    "one above, in the first block": (KEY == EARLY) * 1.171875,
    "one above, in the last block": (KEY == LATE) * 1.171875,
    "half below, first": (KEY < KEYS // 2) * -1.171875,
    "half below, last": (KEY >= KEYS // 2) * -1.6171875,
    "rising": 1 + KEY // 16 / 128,
    "falling": -1 - KEY // 16 / 128,
    "several above their neighbours": 1.4921875 + (KEY % 64 == 7) / 128,
}
# Nats of a unit: on both sides of 2^23 and 2^24 in log2, where fp16 and bf16 have failed, and the end.
UNITS = (3e6, 1.1e7, 1e9, 1e12, 1e36)
CASES = [
    *(("49", dtype, unit) for dtype in DTYPES for unit in UNITS[1:4:2]),
    *(("48", dtype, unit) for dtype in DTYPES for unit in UNITS),
    *(("47", dtype, unit) for dtype in DTYPES for unit in UNITS[1:4:2]),
    ("43", "bf16", 1e12),
    *((rung, "bf16", unit) for rung in ("36", "24") for unit in UNITS[1:4:2]),
]
ON_A_GPU = ("49", "48", "47", "36", "24")
FURTHER = ({"lse": False}, {"causal": True}, {"causal": True, "window_left": 40}, {"softcap": 1e3}, {"sinks": True})


def far(unit, device="cpu", **options):
    """A sequence for each design. Rows of Q by turns have such scores, and see all keys alike."""
    options = {"seqlen_q": 16, "head_dim": 64} | options
    problem = Problem(batch=len(DESIGNS), num_heads=1, seqlen_k=KEYS, softmax_scale=unit / 2**10, **options)
    tensors = make_inputs(problem, device)
    tensors.q.zero_()
    tensors.k.zero_()
    tensors.q[:, ::2, :, 0] = 32
    tensors.k[..., 0, 0] = torch.stack(list(DESIGNS.values())).to(tensors.k) * 32
    tensors.poison()
    return problem, tensors


def require(problem, tensors, lse_rtol=5e-7):
    """O as near as its rounding and P's, the log-sum-exp as fp32 has it."""
    exact = expect(problem, tensors).exact
    torch.testing.assert_close(tensors.o.double(), exact["o"], rtol=0.02, atol=0.004)
    if "lse" in tensors.outputs:
        torch.testing.assert_close(tensors.lse.double(), exact["lse"], rtol=lse_rtol, atol=1e-4)


@pytest.mark.parametrize(("rung", "dtype", "unit"), CASES)
@pytest.mark.slow
def test_far_scores(rung, dtype, unit):
    problem, tensors = far(unit, dtype=dtype)
    on_emulator(built(catalog.find(rung), problem), problem, tensors, race=False)
    require(problem, tensors)


@pytest.mark.parametrize("options", FURTHER, ids=str)
@pytest.mark.parametrize(("rung", "head_dim"), [("48", 128), ("49", 256)])
@pytest.mark.slow
def test_far_scores_with_all_else(rung, head_dim, options):
    problem, tensors = far(1e12, head_dim=head_dim, **options)
    on_emulator(built(catalog.find(rung), problem), problem, tensors, race=False)
    require(problem, tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rung", ON_A_GPU)
def test_far_scores_on_a_gpu(rung, dtype, head_dim):
    """There a product and a difference may be one instruction. Equal keys have equal scores in all blocks."""
    rung, arch = catalog.find(rung), gpu.device_arch()
    if not rung.runs_on(arch) or head_dim not in rung.supports.head_dim:
        pytest.skip(f"{rung.name} does not take head_dim {head_dim} on {arch}")
    for unit in (*UNITS, 1e30):
        for causal in (False, True):
            problem, tensors = far(unit, "cuda", dtype=dtype, head_dim=head_dim, seqlen_q=KEYS, causal=causal)
            on_gpu(build_one(rung, rung.config_for(problem), arch), problem, tensors)()
            require(problem, tensors)
    problem = Problem(num_heads=2, seqlen_q=256, seqlen_k=1024, head_dim=head_dim, dtype=dtype, softmax_scale=1e9)
    tensors = make_inputs(problem, "cuda")
    tensors.k.copy_(tensors.k[:, :64].repeat(1, 16, 1, 1))
    on_gpu(build_one(rung, rung.config_for(problem), arch), problem, tensors)()
    require(problem, tensors, lse_rtol=1e-5)  # its scores are rounded
