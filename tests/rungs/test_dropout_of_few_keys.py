"""Dropout in rows in which one key counts, or a few: there O has the error of its own rounding, as without dropout."""

import pytest
import torch

from flashladder.common import catalog
from flashladder.common.problem.check import expect
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import DTYPES, Problem
from flashladder.common.runtime.execute import on_emulator
from flashladder.tests.support.rung_table import built, id_of

SEQLEN = 256
FEW = 4
RUNGS = [catalog.find(number) for number in ("24", "48")]


def outputs(rung, problem, tensors):
    """O and its exact value, in fp64."""
    tensors.poison()
    on_emulator(built(rung, problem), problem, tensors, race=False)
    return tensors.o.double(), expect(problem, tensors).exact["o"]


def unit(x, dtype):
    """In the last place of each."""
    return torch.finfo(dtype).eps * 2.0 ** x.abs().clamp(min=2**-14).log2().floor()


@pytest.mark.parametrize("dropout_p", [0.1, 0.17, 0.5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rung", RUNGS, ids=id_of)
def test_rows_that_see_few_keys(rung, dtype, dropout_p):
    """They are the first ones of the first tile, which has at most 128."""
    problem = Problem(batch=2, num_heads=2, seqlen_q=128, head_dim=64, dtype=dtype, causal=True, dropout_p=dropout_p)
    o, exact = outputs(rung, problem, make_inputs(problem))
    error = (o - exact).abs() / unit(exact, DTYPES[dtype])
    assert error[:, 0].max() <= 0.501
    scale = unit(exact[:, :FEW].abs().amax(-1, keepdim=True), DTYPES[dtype])
    assert ((o - exact)[:, :FEW].abs() / scale).max() <= 1.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rung", RUNGS, ids=id_of)
def test_rows_in_which_one_key_counts(rung, dtype):
    """Each row's own one: in the first block that is taken, and in later ones, further and further above the others."""
    problem = Problem(batch=1, num_heads=1, seqlen_q=64, seqlen_k=SEQLEN, head_dim=64, dtype=dtype, dropout_p=0.17)
    tensors = make_inputs(problem)
    tensors.q.zero_()
    tensors.k.zero_()
    row = torch.arange(64)
    tensors.q[0, row, 0, row] = (torch.linspace(50, 90, 64) * 8).to(tensors.q.dtype)
    tensors.k[0, row * 4, 0, row] = 8
    o, exact = outputs(rung, problem, tensors)
    assert ((o - exact).abs() / unit(exact, DTYPES[dtype])).max() <= 0.501
