"""serving/01 on the emulator, under the race detector: which bytes of the caches are written, and to what."""

import pytest
import torch

from flashladder.common import catalog
from flashladder.common.compiler import translate
from flashladder.common.problem.fp8 import quantised
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.problem.rotary import Rotary
from flashladder.common.runtime.execute import on_emulator

RUNG = catalog.find("serving/01")
KINDS = {
    "16 bits": {"layout": "padded", "head_dim": 80},
    "16 bits, turned": {"options": {"rotary": True, "rotary_dim": 20}, "dtype": "fp16"},
    "scales of heads": {"options": {"fp8_cache": True}, "head_dim": 256},
    "one scale, turned": {"options": {"fp8_cache": True, "tensor_scales": True, "rotary": True}},
    "scales of pages": {
        "options": {"fp8_cache": True, "page_scales": True, "rotary": True, "rotary_interleaved": True},
        "layout": "bhsd",
    },
}


def as_bytes(cache):
    return cache.contiguous().view(torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
def test_slots_and_nothing_else_are_written(kind):
    """To the bits that torch's operators give. Slots that are none: before the first, and behind the last."""
    values = {"batch": 7, "num_heads": 2, "seqlen_q": 1, "head_dim": 64, **KINDS[kind]}
    values["options"] = {"num_pages": 4, "page_size": 6, "rotary_positions": 9, **values.get("options", {})}
    task = Problem(operation="append", **values)
    tensors = make_inputs(task)
    tensors.slot_mapping[:2] = torch.tensor([24, 2**40])
    wanted = [cache.clone() for cache in (tensors.k_cache, tensors.v_cache)]
    new = [tensors.k_new[:, 0], tensors.v_new[:, 0]]
    if task.rotary:
        tensors.positions[3] = 1000
        rotary = Rotary(tensors.rotary_cos, tensors.rotary_sin, task.rotary_interleaved)
        new[0] = rotary.turned(tensors.k_new, tensors.positions[:, None])[:, 0]
    for cache, keys, scales in zip(wanted, new, ("k_descale", "v_descale"), strict=True):
        for token, slot in enumerate(tensors.slot_mapping.tolist()):
            page, row = divmod(slot, 6)
            if 0 <= page < 4:
                number = keys[token]
                if task.fp8_cache:
                    of_page = tensors.by_name[scales][page if task.page_scales else 0]
                    number = quantised(number, of_page.flatten().expand(2))
                as_number = torch.uint8 if task.fp8_cache else number.dtype
                cache.view(as_number)[page, row] = number.view(as_number)
    on_emulator(translate(RUNG, RUNG.config_for(task), "sm_90a"), task, tensors)
    for cache, expected in zip((tensors.k_cache, tensors.v_cache), wanted, strict=True):
        assert torch.equal(as_bytes(cache), as_bytes(expected))
    assert not [buffer.damage() for buffer in tensors.buffers if buffer.damage()]
