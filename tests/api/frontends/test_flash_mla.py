"""flash_mla_with_kvcache: pages in any order, against the textbook, on shapes of FlashMLA's own tests."""

import math
import re

import pytest
import torch

from flashladder import concat_and_cache_mla, flash_mla_with_kvcache, get_mla_metadata
from flashladder.common import catalog
from flashladder.common.api import mla
from flashladder.common.catalog import winners
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem import latent_rows
from flashladder.common.problem.config import load_gpu

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
COLUMNS, COLUMNS_V, PAGE = 576, 512, 64


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def inputs(device, lengths, seqlen_q=1, heads=16, heads_k=1, columns=COLUMNS):
    """q, pages in random order with NaN where no key is, their table, and the lengths."""
    random, pages = torch.Generator(device).manual_seed(0), max(1, -(-max(lengths) // PAGE))
    drawn = {"generator": random, "device": device}
    q = torch.randn(len(lengths), seqlen_q, heads, columns, **drawn).div(10).bfloat16()
    cache = torch.randn(len(lengths) * pages + 1, PAGE, heads_k, columns, **drawn).div(10).bfloat16()
    table = torch.randperm(len(cache), **drawn)[:-1].view(len(lengths), pages)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    hidden = torch.arange(pages * PAGE, device=device) >= seqlens[:, None]
    cache[table] = cache[table].masked_fill(hidden.view(len(lengths), pages, PAGE, 1, 1), math.nan)
    return q, cache, table.int(), seqlens


def exact(q, cache, table, lengths, causal=False, columns_v=COLUMNS_V):
    """fp64; zero-length rows as FlashMLA has them."""
    o, lse = [], []
    for sequence, length in enumerate(lengths.tolist()):
        (seqlen_q, heads, columns), heads_k = q.shape[1:], cache.shape[2]
        keys = cache[table[sequence].long()].flatten(0, 1)[:length].double().transpose(0, 1)
        rows = q[sequence].double().transpose(0, 1).reshape(heads_k, -1, columns)  # those of heads that share keys
        scores = (rows @ keys.mT * columns**-0.5).view(heads, seqlen_q, length)
        if causal:
            last = torch.arange(q.shape[1], device=q.device)[:, None] + length - q.shape[1]
            scores = scores.masked_fill(torch.arange(length, device=q.device) > last, -math.inf)
        p = scores.softmax(-1).nan_to_num(0).view(*rows.shape[:2], length)
        o.append((p @ keys[..., :columns_v]).view(heads, seqlen_q, columns_v).transpose(0, 1))
        of_rows = scores.logsumexp(-1)
        lse.append(of_rows.masked_fill(of_rows == -math.inf, math.inf))
    return torch.stack(o), torch.stack(lse)


def require_near(o, lse, right, right_lse):
    """FlashMLA's bounds: 8e-4, 2.01/128 of the value, 5e-6 of the angle between the two as vectors.

    Inputs are a tenth of normal ones. With normal ones P, rounded to 16 bits, moves single elements by 0.001.
    """
    torch.testing.assert_close(o.double(), right, rtol=2.01 / 128, atol=8e-4)
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=1e-5)
    cosine = (o.double() * right).sum() * 2 / (o.double().square() + right.square()).sum()
    assert 1 - cosine < 5e-6


def check(device, lengths, causal, columns_v=COLUMNS_V, **sizes):
    """Requires a right answer."""
    q, cache, table, seqlens = inputs(device, lengths, **sizes)
    metadata = get_mla_metadata(seqlens, q.shape[1] * q.shape[2] // cache.shape[2], cache.shape[2])
    found = flash_mla_with_kvcache(q, cache, table, seqlens, columns_v, *metadata, causal=causal)
    require_near(*found, *exact(q, cache, table, seqlens, causal, columns_v))


def in_8_bits(cache, dtype):
    """Pages of rows of 656 bytes, written in random order with slots that are none; and what they mean."""
    slots = torch.randperm(cache.shape[0] * PAGE, device=cache.device)
    latents = cache.flatten(0, 2)[slots]
    rows = cache.new_full((*cache.shape[:3], 656), 255, dtype=torch.uint8).view(dtype)
    none = torch.tensor([-1, -1], device=cache.device)
    first, last = latents[:2] * 0 + 7, latents[-2:] * 0 + 9
    latents = torch.cat((first, latents, last))
    concat_and_cache_mla(latents[:, :512], latents[:, 512:], rows, torch.cat((none, slots, none)))
    return rows, latent_rows.to_numbers(rows)


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ((20, 140), {}),
        ((20, 0), {"seqlen_q": 2, "heads": 32}),
        ((70,), {"seqlen_q": 4, "heads": 32, "heads_k": 2}),
        ((1,), {"heads": 17}),
        ((70,), {"columns": 512}),
        ((70, 3), {"columns": 160, "columns_v": 128, "seqlen_q": 2}),
        ((90,), {"heads": 8, "seqlen_q": 4}),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_shapes(device, lengths, sizes, causal):
    check(device, lengths, causal, **sizes)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_rows_in_8_bits(device, dtype):
    """As the same numbers in 16 bits."""
    q, cache, table, seqlens = inputs(device, (20, 0, 140), seqlen_q=2, heads=8)
    rows, numbers = in_8_bits(cache, dtype)
    assert (numbers.nan_to_num(0) - cache.nan_to_num(0)).abs().max() < 0.03
    found = flash_mla_with_kvcache(q, rows, table, seqlens, COLUMNS_V, causal=True, is_fp8_kvcache=True)
    require_near(*found, *exact(q, numbers, table, seqlens, True))


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("heads", [8, 70])
def test_each_row_sees_the_keys_of_its_list(device, heads, is_fp8):
    """In any order; what is none is left out, as is all behind a list's end. The third list has no key at all."""
    q, cache, table, _ = inputs(device, (70, 100), seqlen_q=2, heads=heads)
    rows, numbers = in_8_bits(cache, torch.uint8) if is_fp8 else (cache, cache)
    keys = (table[:, :, None] * PAGE + torch.arange(PAGE, device=device)).flatten(1).int()
    lists = torch.full((2, 2, 90), 2**31 - 1, dtype=torch.int32, device=device)
    seen = {(0, 0): [3, 69, 0], (0, 1): range(69, 0, -2), (1, 0): [], (1, 1): range(80)}
    for (sequence, row), numbers_of in seen.items():
        lists[sequence, row, 2 : 2 + len(numbers_of)] = keys[sequence, list(numbers_of)]
        lists[sequence, row, 0] = -1
    lists[0, :, 40:] = keys[0, 0]  # behind the end
    lengths = torch.tensor([40, 90], dtype=torch.int32, device=device)
    call = {"indices": lists, "topk_length": lengths, "is_fp8_kvcache": is_fp8}
    o, lse = flash_mla_with_kvcache(q, rows, None, None, COLUMNS_V, **call)
    for (sequence, row), numbers_of in seen.items():
        one = numbers.flatten(0, 1)[keys[sequence, list(numbers_of)].long()][None]
        places, count = torch.zeros(1, 1, device=device), torch.tensor([len(numbers_of)])
        right, right_lse = exact(q[sequence : sequence + 1, row : row + 1], one, places, count)
        if numbers_of:
            require_near(o[sequence, row][None, None], lse[sequence, :, row][None, :, None], right, right_lse)
        else:
            assert (o[sequence, row] == 0).all()
            assert (lse[sequence, :, row] == math.inf).all()


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
        ({"head_dim_v": 256}, "head_dim_v=256; kernels take 576, 576 and 512 or 512, 512 and 512 or 160, 160 and 128"),
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
        ({"is_fp8_kvcache": True}, "rows of 8-bit floats are (num_pages, page_size, heads_k, 656) of torch.uint8"),
        ({"indices": torch.zeros(1, 1, 64)}, "indices is (1, 1, 64) torch.float32 on cpu; with q it is (1, 1, topk)"),
        ({"indices": torch.zeros(1, 1, 64).int(), "causal": True}, "causal=True with indices"),
        ({"topk_length": torch.ones(1).int()}, "topk_length is given without indices"),
        ({"attn_sink": torch.zeros(16)}, "attn_sink is given: kernels here have no attention sinks"),
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
    assert get_mla_metadata(lengths, 16, 1, topk=2048, is_fp8_kvcache=True)[1].tolist() == [0, 1, 2]
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
    """Rungs 03 to 06 load pages by TMA, which not every size fits; GPUs before Hopper have none.

    Few keys of few tiles are a cluster's, where no winner says something else.
    """
    monkeypatch.setattr(winners, "FOLDER", tmp_path)
    q, cache, table, _ = inputs("cpu", (50,))
    long, many = table.repeat(1, 20), table.repeat(9, 1)
    for rows, pages, pages_of, arch, chosen in (
        (q, cache, table, "sm_90a", ("mla/06", 8)),
        (q, cache, long, "sm_90a", ("mla/05", 8)),
        (q.repeat(9, 1, 1, 1), cache, many, "sm_90a", ("mla/06", 4)),
        (q.repeat(17, 1, 1, 1), cache, table.repeat(17, 1), "sm_90a", ("mla/06", 2)),
        (q.repeat(67, 1, 1, 1), cache, table.repeat(67, 1), "sm_90a", ("mla/05", 8)),
        (q.repeat(8, 1, 1, 1), cache, long.repeat(8, 1), "sm_90a", ("mla/06", 8)),
        (q, cache[:, :24], table, "sm_90a", ("mla/02", 8)),
        (q, cache, table, "sm_80", ("mla/00", 8)),
    ):
        gpu = load_gpu("h100" if arch == "sm_90a" else "a100")
        rung, config = catalog.choice(
            mla._problem_of(rows, pages, pages_of, COLUMNS_V, None, False, False), catalog.Card(arch, gpu)
        )
        assert (rung.address, config.as_dict().get("cluster_size", 8)) == chosen


def test_a_gradient_is_refused():
    q, cache, table, seqlens = inputs("cpu", (50,))
    with pytest.raises(UnsupportedProblemError, match="gradient"):
        flash_mla_with_kvcache(q.requires_grad_(), cache, table, seqlens, COLUMNS_V)
