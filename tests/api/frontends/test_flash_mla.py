"""flash_mla_with_kvcache: pages in any order, against the textbook, on shapes of FlashMLA's own tests."""

import math
import re

import pytest
import torch

from flashladder import flash_mla_with_kvcache, get_mla_metadata
from flashladder.common import catalog
from flashladder.common.api import mla
from flashladder.common.catalog import winners
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.config import load_gpu

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
COLUMNS, COLUMNS_V, PAGE = 576, 512, 64


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def inputs(device, lengths, seqlen_q=1, heads=16, heads_k=1):
    """q, pages in random order with NaN where no key is, their table, and the lengths."""
    random, pages = torch.Generator(device).manual_seed(0), max(1, -(-max(lengths) // PAGE))
    drawn = {"generator": random, "device": device}
    q = torch.randn(len(lengths), seqlen_q, heads, COLUMNS, **drawn).div(10).bfloat16()
    cache = torch.randn(len(lengths) * pages + 1, PAGE, heads_k, COLUMNS, **drawn).div(10).bfloat16()
    table = torch.randperm(len(cache), **drawn)[:-1].view(len(lengths), pages)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    hidden = torch.arange(pages * PAGE, device=device) >= seqlens[:, None]
    cache[table] = cache[table].masked_fill(hidden.view(len(lengths), pages, PAGE, 1, 1), math.nan)
    return q, cache, table.int(), seqlens


def exact(q, cache, table, lengths, causal):
    """fp64; zero-length rows as FlashMLA has them."""
    o, lse = [], []
    for sequence, length in enumerate(lengths.tolist()):
        (seqlen_q, heads, _), heads_k = q.shape[1:], cache.shape[2]
        keys = cache[table[sequence].long()].flatten(0, 1)[:length].double().transpose(0, 1)
        rows = q[sequence].double().transpose(0, 1).reshape(heads_k, -1, COLUMNS)  # those of heads that share keys
        scores = (rows @ keys.mT * COLUMNS**-0.5).view(heads, seqlen_q, length)
        if causal:
            last = torch.arange(q.shape[1], device=q.device)[:, None] + length - q.shape[1]
            scores = scores.masked_fill(torch.arange(length, device=q.device) > last, -math.inf)
        p = scores.softmax(-1).nan_to_num(0).view(*rows.shape[:2], length)
        o.append((p @ keys[..., :COLUMNS_V]).view(heads, seqlen_q, COLUMNS_V).transpose(0, 1))
        of_rows = scores.logsumexp(-1)
        lse.append(of_rows.masked_fill(of_rows == -math.inf, math.inf))
    return torch.stack(o), torch.stack(lse)


def check(device, lengths, causal, **sizes):
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
    check(device, lengths, causal, **sizes)


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
        ({"is_fp8_kvcache": True}, "is_fp8_kvcache is given: kernels here have no caches in 8 bits"),
        ({"indices": torch.zeros(1, 1, 64)}, "indices is given: kernels here have no sparse attention"),
    ],
)
def test_what_does_not_go_together_is_refused(change, message):
    q, cache, table, seqlens = inputs("cpu", (50,))
    call = {"q": q, "k_cache": cache, "block_table": table, "cache_seqlens": seqlens, "head_dim_v": COLUMNS_V}
    with pytest.raises(UnsupportedProblemError, match=re.escape(message)):
        flash_mla_with_kvcache(**{**call, **change})


def test_newer_releases_of_flash_mla_prepare_nothing():
    assert get_mla_metadata()[1] is None
    lengths = torch.tensor([5, 7], dtype=torch.int32)
    assert get_mla_metadata(lengths, 16, 1, num_heads_q=16, is_fp8_kvcache=False)[1].tolist() == [0, 1, 2]
    counts = {"num_q_tokens_per_head_k": 16, "num_heads_k": 1, "num_heads_q": None}
    assert get_mla_metadata(lengths, **counts)[1].tolist() == [0, 1, 2]
    with pytest.raises(UnsupportedProblemError, match="num_q_tokens_per_head_k=0: must be at least 1"):
        get_mla_metadata(lengths, num_q_tokens_per_head_k=0)
    for misshapen in (lengths[0], lengths[:, None]):
        with pytest.raises(UnsupportedProblemError, match=r"cache_seqlens has shape .*; it should be \(batch\)"):
            get_mla_metadata(misshapen)
    with pytest.raises(UnsupportedProblemError, match="topk is given: kernels here have no sparse attention"):
        get_mla_metadata(lengths, 16, 1, topk=2048)
    with pytest.raises(UnsupportedProblemError, match="num_heads_k=0: must be at least 1"):
        get_mla_metadata(lengths, 16, 0)
    with pytest.raises(TypeError, match="scale is no argument of FlashMLA's"):
        flash_mla_with_kvcache(*inputs("cpu", (50,)), COLUMNS_V, scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2, 6, 64])
@pytest.mark.parametrize("seqlen_q", [1, 2, 4])
@pytest.mark.parametrize("longest", [20, 140, 4096])
@pytest.mark.parametrize(("heads", "heads_k"), [(16, 1), (32, 2), (48, 3), (64, 1), (64, 8), (128, 1)])
def test_flash_mlas_own_shapes_on_a_gpu(batch, seqlen_q, longest, heads, heads_k):
    """Sequences of any length up to the longest, the second one without keys."""
    lengths = torch.randint(1, longest + 1, (batch,), generator=torch.Generator().manual_seed(0)).tolist()
    lengths = [longest, 0, *lengths][:batch]
    for causal in (False, True):
        check("cuda", lengths, causal, seqlen_q=seqlen_q, heads=heads, heads_k=heads_k)


def test_the_first_rung_that_takes_a_problem_computes_it(monkeypatch, tmp_path):
    """Rungs above 02 load pages by TMA, which not every size fits; GPUs before Hopper have none.

    Few keys of few tiles are a cluster's, where no winner says something else.
    """
    monkeypatch.setattr(winners, "FOLDER", tmp_path)
    q, cache, table, _ = inputs("cpu", (50,))
    long, many = table.repeat(1, 20), table.repeat(9, 1)
    for rows, pages, pages_of, arch, chosen in (
        (q, cache, table, "sm_90a", ("mla/06", 8)),
        (q, cache, long, "sm_90a", ("mla/05", 8)),
        (q.repeat(9, 1, 1, 1), cache, many, "sm_90a", ("mla/06", 4)),
        (q.repeat(17, 1, 1, 1), cache, table.repeat(17, 1), "sm_90a", ("mla/05", 8)),
        (q.repeat(8, 1, 1, 1), cache, long.repeat(8, 1), "sm_90a", ("mla/06", 8)),
        (q, cache[:, :24], table, "sm_90a", ("mla/02", 8)),
        (q, cache, table, "sm_80", ("mla/00", 8)),
    ):
        gpu = load_gpu("h100" if arch == "sm_90a" else "a100")
        rung, config = catalog.choice(mla._problem_of(rows, pages, pages_of, None, False), catalog.Card(arch, gpu))
        assert (rung.address, config.as_dict().get("cluster_size", 8)) == chosen


def test_a_gradient_is_refused():
    q, cache, table, seqlens = inputs("cpu", (50,))
    with pytest.raises(UnsupportedProblemError, match="gradient"):
        flash_mla_with_kvcache(q.requires_grad_(), cache, table, seqlens, COLUMNS_V)
