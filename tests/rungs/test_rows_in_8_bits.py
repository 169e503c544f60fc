"""mla/09 on the emulator, under the race detector: rows in 8 bits that are never rounded.

What it waits for is taken out in test_mla.py.
"""

import pytest
import torch

from flashladder.common import catalog
from flashladder.common.compiler import build_one
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_emulator

RUNG = catalog.find("mla/09")


SCALES = slice(512, 528)  # bytes of a row


def ran(lengths, options=(), block_m=16, race=True, change=lambda tensors: None, **sizes):
    """The tensors and the right answer, after `change` of what was drawn."""
    usual = {"num_heads": 16, "head_dim": 576, "head_dim_v": 512, "num_heads_k": 1, "seqlen_q": 1}
    options = {"fp8_rows": True} | dict(options)
    task = Problem(operation="mla", seqlens_k=lengths, options=options, **(usual | sizes))
    tensors, asked = make_inputs(task), dict(RUNG.config_for(task).items) | {"block_m": block_m}
    change(tensors)
    on_emulator(build_one(RUNG, RUNG.config(**asked), "sm_90a"), task, tensors, race=race)
    return tensors, expect(task, tensors)


def require_right(*asked, **further):
    """Requires O within its tolerance, and the log-sum-exp of fp64."""
    tensors, right = ran(*asked, **further)
    verify(right, tensors.outputs, tensors.buffers).require(RUNG.name)
    torch.testing.assert_close(tensors.lse.double(), right.exact["lse"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "options", "sizes"),
    [
        ((0, 1, 70, 130), {"num_splits": 1}, {"num_heads": 40}),
        ((2, 330), {"num_splits": 2, "page_size": 1}, {"seqlen_q": 3, "num_heads": 8, "causal": True}),
        ((130,), {"paged": False}, {"layout": "padded", "num_heads": 8, "num_heads_k": 2}),
        ((330,), {"sparse": True, "num_splits": 1}, {"num_heads": 17}),
    ],
)
@pytest.mark.parametrize("block_m", [8, 16, 32])
@pytest.mark.slow
def test_rows_that_stay_in_8_bits(block_m, lengths, options, sizes):
    """More blocks than a team's ring has stages, rows that are apart, and rows of which a few follow each other."""
    require_right(lengths, options, block_m, **sizes)


@pytest.mark.parametrize(
    "family",
    ["outlier_channels", "jump_in_turn", "common_scores", "huge_scores", "tiny_scale", "huge_values", "largest_values"],
)
@pytest.mark.slow
def test_f16_has_room(family):
    """For Q, whose largest number decides on a power of two, and for P times scales of any size."""
    require_right((300,), {"num_splits": 2}, family=family, race=False)


@pytest.mark.slow
def test_scales_that_are_far_apart():
    """A group of zeros has the scale 1, however small the others are."""

    def change(tensors):
        scales = tensors.k_cache[..., SCALES].view(torch.float32)
        scales *= 1e-6
        scales[..., 0] = 1
        tensors.k_cache[..., :128] = 0

    require_right((130,), {"paged": False, "num_splits": 1}, change=change, race=False)


@pytest.mark.slow
def test_keys_of_zeros_may_have_scales_of_zero():
    def change(tensors):
        tensors.k_cache[..., SCALES] = 0

    require_right((130,), {"paged": False, "num_splits": 1}, change=change, race=False)


@pytest.mark.slow
def test_a_number_that_is_none_is_seen():
    """In the cache by all rows, in a row of Q by that one."""

    def change(tensors):
        tensors.k_cache[0, 77, 0, 300] = 0x7F
        tensors.q[1, 0, 3, 5] = torch.inf

    tensors, right = ran((130, 130), {"paged": False, "num_splits": 1}, change=change, race=False)
    assert right.exact["o"][0].isnan().all()
    assert torch.equal(tensors.o.isnan(), right.exact["o"].isnan())
    assert tensors.lse[0].isnan().all()
