"""Entries of a block table behind a sequence's keys are never read, and may be anything."""

import pytest
import torch

import flashladder
from flashladder.common.errors import UnsupportedProblemError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PAGE, NUM_PAGES = 16, 6
LENGTHS = (20, 9)
TABLE = ((1, 2, 0), (3, 4, 5))
ANYTHING = ((1, 2, -(2**31)), (3, 99999, 2**31 - 1))


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def numbers(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def normal(*shape, device):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16().to(device)


def appended(table, device, dtype=torch.bfloat16):
    """What a step gives that appends two keys, and its caches."""
    caches = [normal(NUM_PAGES, PAGE, 2, 64, device=device).to(dtype) for _ in "kv"]
    q, new = normal(2, 2, 4, 64, device=device), normal(2, 2, 2, 64, device=device)
    options = {"cache_seqlens": numbers(LENGTHS, device), "block_table": numbers(table, device), "causal": True}
    return flashladder.flash_attn_with_kvcache(q, *caches, new, new, **options), *(x.float() for x in caches)


def read(table, device):
    """What rows against a cache give, what a prompt in pages gives, and what latents give."""
    k, v = (normal(NUM_PAGES, PAGE, 2, 64, device=device) for _ in "kv")
    lengths, table = numbers(LENGTHS, device), numbers(table, device)
    rows, keys = numbers((0, 5, 9), device), numbers((0, 20, 29), device)
    q, latents = normal(2, 1, 16, 576, device=device), normal(NUM_PAGES, PAGE, 1, 576, device=device)
    of_prompt = normal(9, 2, 64, device=device), k, v, rows, keys, 5, 20
    return (
        flashladder.flash_attn_with_kvcache(q[..., :4, :64], k, v, cache_seqlens=lengths, block_table=table),
        flashladder.flash_attn_varlen_func(*of_prompt, block_table=table),
        *flashladder.flash_mla_with_kvcache(q, latents, table, lengths, 512),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_behind_new_keys_they_may_be_anything(device, dtype):
    for expected, found in zip(appended(TABLE, device, dtype), appended(ANYTHING, device, dtype), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.slow
def test_behind_keys_they_may_be_anything(device):
    for expected, found in zip(read(TABLE, device), read(ANYTHING, device), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("bounds", ["window", "padding"])
def test_before_the_first_key_that_is_seen_they_may_be_anything(device, bounds, appends):
    """Servers give back pages that have left a window."""
    k, v = (normal(NUM_PAGES, PAGE, 2, 64, device=device) for _ in "kv")
    q, new = normal(2, 1, 4, 64, device=device), normal(2, 1, 2, 64, device=device)
    more = {"window_size": (10, 0)} if bounds == "window" else {"cache_leftpad": numbers((33, 16), device)}
    more["cache_seqlens"] = numbers((43, 27), device)
    found = [
        flashladder.flash_attn_with_kvcache(
            q, k.clone(), v.clone(), *([new, new] if appends else []), block_table=numbers(table, device), **more
        )
        for table in (((1, 2, 0), (3, 4, 5)), ((2**31 - 1, -77, 0), (99999, 4, -(2**31))))
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("page", [NUM_PAGES, -2])
def test_what_new_keys_are_written_to_is_a_page(page):
    """Two keys behind 15 are on the second page."""
    cache, new = normal(NUM_PAGES, PAGE, 2, 64, device="cpu"), normal(1, 2, 2, 64, device="cpu")
    options = {"cache_seqlens": PAGE - 1, "block_table": numbers(((0, page),), "cpu")}
    with pytest.raises(UnsupportedProblemError, match=f"block_table has pages {min(0, page)} to {max(0, page)}"):
        flashladder.flash_attn_with_kvcache(
            normal(1, 1, 4, 64, device="cpu"), cache, cache.clone(), new, new, **options
        )
