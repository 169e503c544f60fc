"""A cache of 512 columns that is K and V of all heads, by flash_attn_with_kvcache, as of Gemma 4's global layers."""

import pytest
import torch

from flashladder import flash_attn_with_kvcache
from flashladder.common.errors import UnsupportedProblemError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def drawn(*shape, seed=0, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)


def exact(q, keys, causal):
    """O and the log-sum-exp of one sequence."""
    scores = torch.einsum("qhd,kd->hqk", q.double(), keys.double()) * 512**-0.5
    if causal:
        rows, count = q.shape[0], len(keys)
        behind = torch.arange(count) > torch.arange(rows)[:, None] + count - rows
        scores.masked_fill_(behind.to(q.device), -torch.inf)
    return torch.einsum("hqk,kd->qhd", scores.softmax(-1), keys.double()), scores.logsumexp(-1)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("paged", [False, True], ids=["in one piece", "pages"])
def test_it_is_k_and_v(paged, heads, device):
    q, lengths = drawn(3, 2, heads, 512, device=device), (60, 0, 37)
    cache, table = drawn(3, 64, 1, 512, seed=1, device=device), None
    keys = [cache[b, :length, 0] for b, length in enumerate(lengths)]
    if paged:
        table = torch.tensor([[3, 0, 5, 9], [0, 0, 0, 0], [7, 2, 1, 99]], dtype=torch.int32, device=device)
        pages = drawn(10, 16, 1, 512, seed=1, device=device)
        cache = pages
        keys = [pages[table[b].clamp(max=9).long(), :, 0].flatten(0, 1)[:length] for b, length in enumerate(lengths)]
    out = torch.empty_like(q)
    given = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device=device), "block_table": table}
    o, lse = flash_attn_with_kvcache(q, cache, cache, **given, causal=True, out=out, return_softmax_lse=True)
    assert o is out
    for b in (0, 2):
        expected, expected_lse = exact(q[b], keys[b], causal=True)
        assert (o[b] - expected).abs().max() < 0.02
        assert (lse[b] - expected_lse).abs().max() < 1e-4
    assert (o[1] == 0).all()
    assert (lse[1] == -torch.inf).all(), "of no key, as in the other calls of this function"


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"softcap": 3.0}, "takes no softcap"),
        ({"window_size": (5, 0)}, "takes no window_size"),
        ({"num_splits": 2, "s_aux": torch.zeros(16)}, "takes no s_aux, num_splits"),
    ],
)
def test_what_it_takes_no(more, named):
    q, cache = drawn(2, 1, 16, 512), drawn(2, 64, 1, 512)
    with pytest.raises(UnsupportedProblemError, match=named):
        flash_attn_with_kvcache(q, cache, cache, cache_seqlens=torch.tensor([3, 4], dtype=torch.int32), **more)


def test_k_and_v_of_512_columns_that_are_two_tensors():
    q, cache = drawn(2, 1, 16, 512), drawn(2, 64, 1, 512)
    with pytest.raises(UnsupportedProblemError, match="not 512"):
        flash_attn_with_kvcache(q, cache, cache.clone(), cache_seqlens=torch.tensor([3, 4], dtype=torch.int32))
