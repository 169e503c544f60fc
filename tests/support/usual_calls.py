"""Calls of the kinds whose kernels a wheel has: of sizes, and of tensors, that a `random.Random` chooses."""

import torch

from flashladder import attention, flash_attn_varlen_func, flash_attn_with_kvcache, packed_attention

DTYPES, HEAD_DIMS = (torch.bfloat16, torch.float16), (64, 128)
PAGE_SIZES = (16, 32, 64, 128, 256)


def _like(random):
    dtype, head_dim = random.choice(DTYPES), random.choice(HEAD_DIMS)
    return lambda *shape: torch.empty(*shape, head_dim, dtype=dtype)


def _flag(random):
    return random.random() < 0.5


def dense(random):
    """attention, of short keys or long ones."""
    of, heads = _like(random), random.choice((1, 4))
    k = of(1, random.choice((5, 299, 3000)), heads)
    return attention(of(1, random.choice((5, 300)), 4), k, k, causal=_flag(random), return_lse=_flag(random))


def packed(random):
    """packed_attention, and flash-attn's function of it."""
    of, count = _like(random), random.choice((100, 3000))
    q, k, starts = of(count, 4), of(count, 2), torch.tensor([0, 40, count], dtype=torch.int32)
    sizes = q, k, k, starts, starts, count, count
    if _flag(random):
        return packed_attention(*sizes, causal=_flag(random), return_lse=_flag(random))
    return flash_attn_varlen_func(*sizes, causal=_flag(random), return_attn_probs=_flag(random))


def _pages(random, of, batch, heads, room):
    size = random.choice(PAGE_SIZES)
    pages = of(4, size, heads)
    return pages, torch.zeros(batch, -(-room // size), dtype=torch.int32)


def step(random):
    """flash_attn_with_kvcache, of one row or a few, with new keys or without."""
    of, batch, heads, rows = (
        _like(random),
        random.choice((1, 2, 8)),
        random.choice((1, 8, 12, 32)),
        random.choice((1, 4)),
    )
    room, options = random.choice((500, 9000)), {}
    cache = of(batch, room, heads)
    if _flag(random):
        cache, options["block_table"] = _pages(random, of, batch, heads, room)
    if _flag(random):
        options |= {"k": of(batch, 1, heads), "v": of(batch, 1, heads)}
    lengths = torch.full((batch,), 17, dtype=torch.int32)
    q, v_cache = of(batch, rows, 2 * heads), torch.empty_like(cache)
    splits = random.choice((0, 0, 1))
    return flash_attn_with_kvcache(
        q, cache, v_cache, cache_seqlens=lengths, causal=_flag(random), num_splits=splits, **options
    )


def rows_over_pages(random):
    """flash_attn_varlen_func, of pages."""
    of, batch, heads = _like(random), random.choice((1, 8)), random.choice((1, 8))
    pages, table = _pages(random, of, batch, heads, 2048)
    starts, lengths = torch.arange(batch + 1, dtype=torch.int32) * 4, torch.full((batch,), 17, dtype=torch.int32)
    q, v_pages = of(4 * batch, 2 * heads), torch.empty_like(pages)
    options = {"causal": _flag(random), "block_table": table, "seqused_k": lengths}
    return flash_attn_varlen_func(q, pages, v_pages, starts, None, 4, 2048, **options)


CALLS = dense, packed, step, step, rows_over_pages
