"""torch's FlopCounterMode counts our operators by torch's formulas for attention."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import flashladder

BF16, INT = torch.bfloat16, torch.int32


def drawn(*shape, device="cpu"):
    return torch.zeros(shape, dtype=BF16, device=device)


def counted(call, *tensors):
    with FlopCounterMode(display=False) as counter:
        call(*tensors)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"window": (3, 0), "softcap": 2.0}, {"score": "s * 2"}],
    ids=["plain", "general", "expressions"],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.slow
def test_both_passes_count(options, device):
    q, k = drawn(2, 20, 4, 64, device=device).requires_grad_(), drawn(2, 36, 2, 64, device=device).requires_grad_()
    shapes = (2, 4, 20, 64), (2, 2, 36, 64), (2, 2, 36, 64)
    forward, backward = sdpa_flop_count(*shapes), sdpa_backward_flop_count(shapes[0], *shapes)
    with torch.no_grad():
        assert counted(lambda: flashladder.attention(q, k, k, **options)) == forward
    assert counted(lambda: flashladder.attention(q, k, k, **options).sum().backward()) == forward + backward


def test_packed_sequences_count_alone():
    q, cu_seqlens = drawn(20, 4, 64), torch.tensor([0, 5, 20], dtype=INT)
    wanted = sum(sdpa_flop_count(*[(1, 4, length, 64)] * 3) for length in (5, 15))
    assert counted(lambda: flashladder.packed_attention(q, q, q, cu_seqlens, cu_seqlens, 15, 15)) == wanted


def test_caches_count_the_keys_that_they_have():
    q, cache, lengths = drawn(2, 1, 4, 64), drawn(2, 32, 2, 64), torch.tensor([5, 20], dtype=INT)
    wanted = sum(sdpa_flop_count((1, 4, 1, 64), (1, 2, length, 64), (1, 2, length, 64)) for length in (6, 21))
    new = drawn(2, 1, 2, 64)
    caches = cache, cache.clone()
    assert counted(lambda: flashladder.flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=lengths)) == wanted
    latents, table = drawn(2, 64, 1, 576), torch.tensor([[0], [1]], dtype=INT)
    wanted = sum(sdpa_flop_count((1, 16, 1, 576), (1, 1, length, 576), (1, 1, length, 512)) for length in (5, 20))
    rows = drawn(2, 1, 16, 576)
    assert counted(lambda: flashladder.flash_mla_with_kvcache(rows, latents, table, lengths, 512)) == wanted
