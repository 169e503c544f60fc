"""flash_mla_with_kvcache: pages in any order, against the textbook, on shapes of FlashMLA's own tests."""

import math
import re

import pytest
import torch

from flashladder import flash_mla_with_kvcache, get_mla_metadata
from flashladder.common.api import mla
from flashladder.common.errors import UnsupportedProblemError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
COLUMNS, COLUMNS_V, PAGE = 576, 512, 64


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def inputs(device, lengths, seqlen_q=1, heads=16, heads_k=1):
    """q, pages in random order with NaN where no key is, their table, and the lengths."""
    random = torch.Generator().manual_seed(0)
    pages = max(1, -(-max(lengths) // PAGE))
    q = torch.randn(len(lengths), seqlen_q, heads, COLUMNS, generator=random).div(10).bfloat16()
    cache = torch.randn(len(lengths) * pages + 1, PAGE, heads_k, COLUMNS, generator=random).div(10).bfloat16()
    table = torch.randperm(len(cache), generator=random)[:-1].view(len(lengths), pages).int()
    for sequence, length in enumerate(lengths):
        cache[table[sequence].long()] = torch.where(
            (torch.arange(pages * PAGE) < length).view(pages, PAGE, 1, 1), cache[table[sequence].long()], math.nan
        )
    return [tensor.to(device) for tensor in (q, cache, table, torch.tensor(lengths, dtype=torch.int32))]


def exact(q, cache, table, lengths, causal):
    """fp64; zero-length rows as FlashMLA has them."""
    o, lse = [], []
    for sequence, length in enumerate(lengths.tolist()):
        heads, heads_k = q.shape[2], cache.shape[2]
        keys = cache[table[sequence].long()].flatten(0, 1)[:length].double().transpose(0, 1)
        keys = keys.repeat_interleave(heads // heads_k, 0)
        scores = q[sequence].double().transpose(0, 1) @ keys.mT * COLUMNS**-0.5
        if causal:
            last = torch.arange(q.shape[1], device=q.device)[:, None] + length - q.shape[1]
            scores = scores.masked_fill(torch.arange(length, device=q.device) > last, -math.inf)
        o.append((scores.softmax(-1).nan_to_num(0) @ keys[..., :COLUMNS_V]).transpose(0, 1))
        of_rows = scores.logsumexp(-1)
        lse.append(of_rows.masked_fill(of_rows == -math.inf, math.inf))
    return torch.stack(o), torch.stack(lse)


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ((20, 140), {}),
        ((20, 0), {"seqlen_q": 2, "heads": 32}),
        ((70,), {"seqlen_q": 4, "heads": 32, "heads_k": 2}),
        ((1,), {"heads": 17}),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_shapes(device, lengths, sizes, causal):
    """FlashMLA's bounds: 8e-4, 2.01/128 of the value, 5e-6 of the angle between the two as vectors.

    Inputs are a tenth of normal ones. With normal ones P, rounded to 16 bits, moves single elements by 0.001.
    """
    q, cache, table, seqlens = inputs(device, lengths, **sizes)
    metadata = get_mla_metadata(seqlens, q.shape[1] * q.shape[2] // cache.shape[2], cache.shape[2])
    o, lse = flash_mla_with_kvcache(q, cache, table, seqlens, COLUMNS_V, *metadata, causal=causal)
    right, right_lse = exact(q, cache, table, seqlens, causal)
    torch.testing.assert_close(o.double(), right, rtol=2.01 / 128, atol=8e-4)
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=1e-5)
    cosine = (o.double() * right).sum() * 2 / (o.double().square() + right.square()).sum()
    assert 1 - cosine < 5e-6


def test_a_scale_of_the_model(device):
    """Twice the scale is the same as Q twice as large."""
    q, cache, table, seqlens = inputs(device, (50,))
    scale = 2 * COLUMNS**-0.5
    scaled, _ = flash_mla_with_kvcache(q, cache, table, seqlens, COLUMNS_V, softmax_scale=scale)
    doubled, _ = flash_mla_with_kvcache(q * 2, cache, table, seqlens, COLUMNS_V)
    torch.testing.assert_close(scaled, doubled)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim_v": 256}, "head_dim_v=256; kernels take 576, 576 and 512"),
        ({"q": torch.zeros(1, 1, 16, 512).bfloat16()}, "q has 512 columns"),
        (
            {"k_cache": torch.zeros(2, 64, 1, 576)},
            "k_cache is torch.float32 on cpu; like q it should be",
        ),
        ({"block_table": torch.zeros(1, 1)}, "block_table is (1, 1) torch.float32"),
        ({"block_table": torch.tensor([[7]], dtype=torch.int32)}, "block_table has pages 7 to 7; the cache has 2"),
        (
            {"cache_seqlens": torch.tensor([65], dtype=torch.int32)},
            "cache_seqlens=[65]: the cache has room for 0 to",
        ),
        ({"causal": 1}, "causal=1 is of type int"),
        ({"is_fp8_kvcache": True}, "is_fp8_kvcache: kernels attend to all keys of a cache in 16 bits"),
        ({"indices": 0, "attn_sink": 0}, "indices, attn_sink: kernels attend to all keys"),
        (dict.fromkeys(("extra_k_cache", "extra_indices_in_kvcache"), 0), "extra_k_cache, extra_indices_in_kvcache: "),
        (dict.fromkeys(("topk_length", "extra_topk_length"), 0), "topk_length, extra_topk_length: "),
    ],
)
def test_what_does_not_go_together_is_refused(change, message):
    q, cache, table, seqlens = inputs("cpu", (50,))
    call = {"q": q, "k_cache": cache, "block_table": table, "cache_seqlens": seqlens, "head_dim_v": COLUMNS_V}
    with pytest.raises(UnsupportedProblemError, match=re.escape(message)):
        flash_mla_with_kvcache(**{**call, **change})


def test_calls_as_flash_mla_has_them_since_2026():
    """Metadata of nothing, None for the parts, and arguments of kernels that are not asked for."""
    q, cache, table, seqlens = inputs("cpu", (20,))
    metadata, parts = get_mla_metadata()
    assert parts is None
    unused = dict.fromkeys(("indices", "attn_sink", "topk_length"))
    found, _ = flash_mla_with_kvcache(
        q, cache, table, seqlens, COLUMNS_V, metadata, parts, is_fp8_kvcache=False, **unused
    )
    before, _ = flash_mla_with_kvcache(q, cache, table, seqlens, COLUMNS_V, *get_mla_metadata(seqlens, 16, 1))
    assert torch.equal(found, before)


def test_the_first_rung_that_takes_a_problem_computes_it(monkeypatch):
    """Rungs above 02 load pages by TMA, which not every size fits; GPUs before Hopper have no TMA."""
    monkeypatch.setattr(mla, "RUNGS", ("mla/05", "mla/00"))
    q, cache, table, _ = inputs("cpu", (50,))
    rung = mla._rung.__wrapped__
    for pages, arch, chosen in (
        (cache, "sm_90a", "mla/05"),
        (cache[:, :24], "sm_90a", "mla/00"),
        (cache, "sm_80", "mla/00"),
    ):
        assert rung(mla._problem_of(q, pages, table, None, False), arch) == chosen


def test_a_gradient_is_refused():
    q, cache, table, seqlens = inputs("cpu", (50,))
    with pytest.raises(UnsupportedProblemError, match="gradient"):
        flash_mla_with_kvcache(q.requires_grad_(), cache, table, seqlens, COLUMNS_V)
