"""torch.compile does not look at what changes between two calls: it would compile anew, and its kernels may then round
otherwise.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import flashladder
from flashladder.common.api import operator
from flashladder.common.runtime import fast_path

Q = torch.zeros(1, 64, 2, 64).bfloat16()
STARTS = torch.tensor([0, 30, 64], dtype=torch.int32)
LENGTHS = torch.tensor([20], dtype=torch.int32)
LATENTS, TABLE = torch.zeros(1, 1, 16, 576).bfloat16(), torch.zeros(1, 1, dtype=torch.int32)
CALLS = {
    "attention": lambda q: flashladder.attention(q, q, q, causal=True),
    "window": lambda q: flashladder.attention(q, q, q, window=(3, 3)),
    "flash_attn_func": lambda q: flashladder.flash_attn_func(q, q, q),
    "packed": lambda q: flashladder.packed_attention(q[0], q[0], q[0], STARTS, STARTS, 34, 34),
    "cache": lambda q: flashladder.flash_attn_with_kvcache(q[:, :1], q, q, cache_seqlens=LENGTHS),
    "new keys": lambda q: flashladder.flash_attn_with_kvcache(
        q[:, :1], q.clone(), q.clone(), q[:, :1], q[:, :1], cache_seqlens=LENGTHS
    ),
    "latents": lambda q: flashladder.flash_mla_with_kvcache(
        LATENTS, LATENTS.new_zeros(1, 64, 1, 576), TABLE, LENGTHS, 512
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("trains", [False, True])
def test_the_cpp_way_may_come_between_two_calls(call, trains, monkeypatch):
    if trains and call in (CALLS["cache"], CALLS["new keys"], CALLS["latents"]):
        pytest.skip("they have no gradients")
    q, counter = Q.clone().requires_grad_(trains), CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    monkeypatch.setattr(operator, "plain", {})
    for extension, missing in ((None, fast_path.NOT_ASKED), (fast_path.made(), ""), (None, "it is being compiled")):
        monkeypatch.setattr(fast_path, "extension", extension)
        monkeypatch.setattr(fast_path, "missing", missing)
        compiled(q)
        assert counter.frame_count == 1
