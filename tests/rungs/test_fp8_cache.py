"""decode/11 on the emulator, under the race detector: caches in e4m3, whose scales are tensors."""

import pytest
import torch

from flashladder.common import catalog
from flashladder.common.compiler import translate
from flashladder.common.errors import ConfigError, UnsupportedProblemError
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.fp8 import FP8, LARGEST, quantised
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_emulator

RUNG = catalog.find("decode/11")
LENGTHS = (0, 1, 40, 300)
PAGED = {"paged": True, "page_size": 24}


def problem(lengths=LENGTHS, options=None, **values):
    """Few heads of few columns, of which two share one of K and V; two rows a sequence."""
    usual = {"num_heads": 4, "num_heads_k": 2, "head_dim": 64, "seqlen_q": 2, "causal": True, "seqlens_k": lengths}
    return Problem(operation="decode", options={"fp8_cache": True, **(options or {})}, **(usual | values))


def emulated(task, tensors=None):
    """Requires a right output without a race; returns the tensors."""
    tensors = tensors or make_inputs(task)
    on_emulator(translate(RUNG, RUNG.config_for(task), "sm_90a"), task, tensors)
    verify(expect(task, tensors), tensors.outputs, tensors.buffers).require(RUNG.name)
    return tensors


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_any_lengths(dtype):
    """NaN beyond each length, in the guards and between padded rows are never seen."""
    tensors = emulated(problem(layout="padded", dtype=dtype))
    assert (tensors.o[0] == 0).all()
    assert (tensors.lse[0] == -torch.inf).all()


@pytest.mark.parametrize("columns", [96, 128, pytest.param(256, marks=pytest.mark.slow)])
def test_other_columns(columns):
    emulated(problem((0, 150), {"num_splits": 2}, head_dim=columns, layout="padded"))


def test_sinks():
    """Beside scales of V."""
    tensors = emulated(problem((0, 150), {"num_splits": 3}, sinks=True))
    torch.testing.assert_close(tensors.lse[0], tensors.sinks[:, None].expand(-1, 2))


def test_pages_of_more_blocks_than_the_ring_has_stages():
    emulated(problem((1, 900), {**PAGED, "num_splits": 2}, num_heads=2, num_heads_k=1))


@pytest.mark.parametrize("family", ["jump_rows", "maximum_in_turn"])
def test_eight_rows_of_other_families(family):
    """Of two tiles of rows."""
    emulated(problem((137,), seqlen_q=8, family=family))


def test_rows_of_any_magnitude():
    """Each has a power of 2 of its own, in which it becomes f16: an infinity harms its own row alone."""
    task = problem((137,), {"num_splits": 1})
    tensors = make_inputs(task)
    tensors.q.mul_(torch.tensor([2.0**-100, 2.0**-20, 1.0, 2.0**60])[:, None])
    expected = emulated(task, tensors).o.clone()
    tensors.q[0, 0, 1, 3] = torch.inf
    on_emulator(translate(RUNG, RUNG.config_for(task), "sm_90a"), task, tensors)
    assert not tensors.o[0, 0, 1].isfinite().all()
    tensors.o[0, 0, 1] = expected[0, 0, 1]
    assert torch.equal(tensors.o, expected)


def test_every_number_of_e4m3():
    """As V of one key, which is O then: none of 16 bits lies between. Its scale is a power of 2."""
    task = problem((1,), seqlen_q=1, head_dim=256, num_heads=2, num_heads_k=2)
    tensors = make_inputs(task)
    octets = torch.arange(256, dtype=torch.uint8)
    octets[[127, 255]] = 0  # NaN
    tensors.v_cache.copy_(octets.view(FP8).expand_as(tensors.v_cache))
    tensors.v_descale.copy_(torch.tensor([[0.5, 8.0]]))
    emulated(task, tensors)
    for head, scale in enumerate((0.5, 8.0)):
        assert torch.equal(tensors.o[0, 0, head].float(), scale * octets.view(FP8).float())


def test_drawn_caches_saturate():
    """In some heads and not in others, which have other scales."""
    tensors = make_inputs(problem((300, 200)))
    largest = tensors.k_cache[0].float().abs().nan_to_num().amax((0, 2))
    assert (largest == LARGEST).any()
    assert len(set(tensors.k_descale.flatten().tolist())) == 4
    assert tensors.k_cache[1, 200:].float().isnan().all()


def test_numbers_beyond_the_largest_saturate():
    numbers = torch.tensor([[448.0, 449.0, -1e30, torch.inf, 7.0, torch.nan]]).repeat(2, 1)
    found = quantised(numbers, torch.tensor([1.0, 2.0])).float()
    assert found[0, :5].tolist() == [448, 448, -448, 448, 7]
    assert found[1, :5].tolist() == [224, 224, -448, 448, 3.5]
    assert found[:, 5].isnan().all()


def test_a_byte_a_number():
    task, wide = problem((3, 5)), Problem(operation="decode", seqlens_k=(3, 5), num_heads=4, num_heads_k=2, head_dim=64)
    assert 2 * task.asked.bytes_moved(task) == wide.asked.bytes_moved(wide) == 2 * 8 * 2 * 128


def test_other_caches_are_refused():
    """By this rung those in 16 bits, by the others those in 8."""
    with pytest.raises(ConfigError, match="fp8_cache=false is not one of true, which decode/11_fp8_cache takes"):
        RUNG.config_for(problem(options={"fp8_cache": False}))
    below = catalog.find("decode/07")
    with pytest.raises(UnsupportedProblemError, match=r"takes fp8_cache false, not true; the nearest .* is decode/11"):
        below.config_for(problem())
