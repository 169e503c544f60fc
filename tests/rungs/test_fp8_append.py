"""decode/14 on the emulator, under the race detector: caches in e4m3 that grow, and what rows see of them."""

import pytest
import torch

from flashladder.common import catalog
from flashladder.common.compiler import translate
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.fp8 import quantised
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.problem.rotary import Rotary
from flashladder.common.runtime.execute import on_emulator

RUNG = catalog.find("decode/14")
LENGTHS = (0, 1, 40, 150)
PAGED = {"paged": True, "page_size": 24}
KINDS = {  # each is compiled once
    "a window, sinks": {"window_left": 40, "sinks": True},
    "softcap, ALiBi, padding": {"softcap": 5.0, "alibi": True, "causal": False, "options": {"leftpad": True}},
    "scales of pages": {"options": {**PAGED, "page_scales": True, "num_splits": 2}, "dtype": "fp16"},
    "one scale": {"options": {"tensor_scales": True, "num_splits": 3}, "head_dim": 96},
    "a tree": {"options": {"tree": True, "tensor_scales": True}, "seqlen_q": 9},
    "all": {"window_left": 60, "sinks": True, "softcap": 9.0, "options": {**PAGED, "page_scales": True}},
    "keys": {"options": {"new_keys": True, "seqlen_new": 3}, "layout": "padded"},
    "keys, one scale": {"options": {"new_keys": True, "tensor_scales": True}, "head_dim": 256, "window_left": 30},
    "keys, turned, scales of pages": {
        "options": {**PAGED, "new_keys": True, "seqlen_new": 5, "rotary": True, "rotary_dim": 20, "page_scales": True},
        "layout": "padded",
        "sinks": True,
    },
}


def problem(lengths=LENGTHS, options=(), **values):
    usual = {"num_heads": 4, "num_heads_k": 2, "head_dim": 64, "seqlen_q": 2, "causal": True, "seqlens_k": lengths}
    return Problem(operation="decode", options={"fp8_cache": True, **dict(options)}, **(usual | values))


def run(task, tensors):
    on_emulator(translate(RUNG, RUNG.config_for(task), "sm_90a"), task, tensors)


def grown(task, tensors, caches):
    """What the caches should be behind a run: bytes as they were, and new keys where a table says, rounded."""
    new = [tensors.k_new, tensors.v_new]
    places = tensors.cache_seqlens.long()[:, None] + torch.arange(task.seqlen_new)
    if task.rotary:
        new[0] = Rotary(tensors.rotary_cos, tensors.rotary_sin, task.rotary_interleaved).turned(new[0], places)
    for cache, keys, scales in zip(caches, new, (tensors.k_descale, tensors.v_descale), strict=True):
        for sequence, row in torch.cartesian_prod(torch.arange(task.batch), torch.arange(task.seqlen_new)).tolist():
            page, at = sequence, int(places[sequence, row])
            if task.paged:
                page, at = int(tensors.block_table[sequence, at // task.page_size]), at % task.page_size
            of_heads = scales[0 if task.tensor_scales else page if task.page_scales else sequence]
            of_heads = of_heads.flatten().expand(task.num_heads_k)
            cache[page, at] = quantised(keys[sequence, row], of_heads).view(torch.uint8)
    return caches


QUICK = ("all", "keys, turned, scales of pages")


@pytest.mark.parametrize("kind", [pytest.param(x, marks=[] if x in QUICK else pytest.mark.slow) for x in KINDS])
def test_rows_and_new_keys(kind):
    """NaN beyond lengths, in padding, in unused pages and as their scales is never seen."""
    task = problem(**KINDS[kind])
    tensors = make_inputs(task)
    before = [cache.view(torch.uint8).clone() for cache in (tensors.k_cache, tensors.v_cache)]
    run(task, tensors)
    verify(expect(task, tensors), tensors.outputs, tensors.buffers).require(kind)
    if task.new_keys:
        before = grown(task, tensors, before)
    for cache, wanted in zip((tensors.k_cache, tensors.v_cache), before, strict=True):
        assert torch.equal(cache.view(torch.uint8), wanted)


def test_new_keys_saturate_and_keep_nan():
    task = problem((5,), {"new_keys": True, "seqlen_new": 2})
    tensors = make_inputs(task)
    tensors.k_descale.fill_(1.0)
    tensors.k_new[0, 0, 0, :4] = torch.tensor([1e30, -torch.inf, torch.nan, 449.0])
    run(task, tensors)
    assert tensors.k_cache[0, 5, 0, :4].float().nan_to_num(7.0).tolist() == [448, -448, 7, 448]


@pytest.mark.parametrize("table", [-1, 2**31 - 1])
def test_a_page_that_is_none_is_not_written(table):
    task = problem((16, 30), {"paged": True, "page_size": 16, "new_keys": True, "seqlen_new": 2})
    tensors = make_inputs(task)
    tensors.block_table[:, 1:] = table
    before = [cache.view(torch.uint8).clone() for cache in (tensors.k_cache, tensors.v_cache)]
    run(task, tensors)
    for cache, wanted in zip((tensors.k_cache, tensors.v_cache), before, strict=True):
        assert torch.equal(cache.view(torch.uint8), wanted)


def test_scales_far_apart():
    """Of pages: V by scales from 2^-40 to 2^40, the largest first or last."""
    task = problem((96,), {"paged": True, "page_size": 16, "page_scales": True, "num_splits": 1}, seqlen_q=1)
    for powers in ((40, 0, -40, 3, 3, 3), (-40, -40, -20, 0, 20, 40)):
        tensors = make_inputs(task)
        tensors.v_descale[tensors.block_table[0, :6].long()] = 2.0 ** torch.tensor(powers)[:, None, None].float()
        run(task, tensors)
        o, exact = tensors.o.double(), expect(task, tensors).exact["o"]
        assert ((o - exact).abs().max() / exact.abs().max()) < 2**-7


def test_scales_of_a_page_that_a_row_does_not_see_are_nothing_to_it():
    """Nor to the bits of its O: the last key is that of the last row, in a page of its own."""
    task = problem((49,), {"paged": True, "page_size": 16, "page_scales": True, "num_splits": 1})
    outputs = []
    for times in (1.0, 37.0):
        tensors = make_inputs(task)
        for scales in (tensors.k_descale, tensors.v_descale):
            scales[tensors.block_table[0, 3].long()] *= times
        run(task, tensors)
        outputs.append(tensors.o)
    first, second = outputs
    assert torch.equal(first[:, 0], second[:, 0])
    assert not torch.equal(first[:, 1], second[:, 1])
