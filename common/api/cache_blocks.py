"""Decode over blocks of a cache that each row chooses, as MiniMax-M3 does."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashladder.common.api import caches, kvcache, validate
from flashladder.common.api.caches import Cache
from flashladder.common.errors import UnsupportedProblemError

_WANTED = "(batch, seqlen_q, heads_k, count), torch.int32 or torch.int64"
_MOST = 2**31 - 1  # an entry of a block table is an int32
_NONE = _MOST  # a block that is none; it comes behind all others


def decode_blocks(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    blocks: torch.Tensor,
    *,
    block_size: int = 128,
    cache_seqlens: int | torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    k_descale: torch.Tensor | float | None = None,
    v_descale: torch.Tensor | float | None = None,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q, (batch, seqlen_q, heads, head_dim), over the blocks of keys that each row chose.

    `blocks` is (batch, seqlen_q, heads_k, count), int32 or int64: for each row and head of K the numbers of up to
    `count` blocks of block_size keys of its sequence, in any order, each once. Numbers below 0 and blocks behind the
    last key are none. The other arguments, O and the log-sum-exp are those of `flash_attn_with_kvcache`; scales of
    8-bit floats are a number, (1,), or of heads, (batch, heads_k).

    A row's blocks are pages to that function: a head of K of a row is a sequence, and heads of q that share it are its
    heads. Nothing of the cache is copied; tables are made by a few of torch's operators. Pages have as many keys as
    divide block_size and the cache's pages (without a block_table, its room): 64 or more are fast. K and V are
    strided alike, as far as sequences, keys and heads go. Forward only. After a first call a CUDA graph may capture it.

    Raises UnsupportedProblemError for tensors that do not go together, and on the CPU for a block that is there twice.
    """
    q, k_cache, v_cache = validate.tensors(validate.BATCH, q=q, k_cache=k_cache, v_cache=v_cache)
    size = validate.whole("block_size", block_size)
    if size < 1:
        raise UnsupportedProblemError(f"block_size={size}: must be at least 1")
    cache = caches.cache_of(q, k_cache, v_cache, block_table, None, k_cache.dtype)
    batch, rows, heads, head_dim = q.shape
    heads_k = k_cache.shape[2]
    if not heads_k or heads % heads_k:
        raise UnsupportedProblemError(f"heads={heads} must be a multiple of heads_k={heads_k}")
    _check_blocks(blocks, (batch, rows, heads_k), q.device)
    settings: dict[str, Any] = {"softmax_scale": softmax_scale, "softcap": softcap}
    return_softmax_lse = validate.flag("return_softmax_lse", return_softmax_lse)
    if validate.surely(k_cache.numel() == 0):
        settings |= {"block_table": block_table, "return_softmax_lse": return_softmax_lse, "out": out}
        return kvcache.flash_attn_with_kvcache(q, k_cache, v_cache, **settings)
    lengths = caches.lengths_of(cache_seqlens, cache).clamp(max=caches.room_of(cache)).view(-1, 1, 1, 1)
    if validate.flag("causal", causal):  # the last row sees all keys
        lengths = lengths - torch.arange(rows - 1, -1, -1, device=q.device)[:, None, None]
    lengths = lengths.expand(batch, rows, heads_k, 1)

    chosen, num_keys = _in_order(blocks, size, lengths)
    _refuse_repeated(chosen)
    page = _divisor(size, k_cache.shape[1])
    k_pages, v_pages, unit = _pages_of_heads(cache, page)
    table = _table_of(chosen.where(chosen < _NONE, 0), cache, size, page, unit)
    parts = batch * rows * heads_k
    scales = {"k_descale": k_descale, "v_descale": v_descale}
    found = kvcache.flash_attn_with_kvcache(
        q.reshape(parts, 1, heads // heads_k, head_dim),
        k_pages,
        v_pages,
        cache_seqlens=num_keys.reshape(parts).int(),
        block_table=table.reshape(parts, table.shape[3]),
        return_softmax_lse=True,
        **settings,
        **{name: _of_parts(name, scale, (batch, rows, heads_k)) for name, scale in scales.items()},
    )
    o = found[0].view(batch, rows, heads, v_cache.shape[3])
    if out is not None:
        like_o = (batch, rows, heads, v_cache.shape[3])
        validate.like("out", out, lambda shape: shape == like_o, o.dtype, o.device, f"O is {like_o}")
        o = out.copy_(o)
    if not return_softmax_lse:
        return o
    return o, found[1].view(batch, rows, heads).transpose(1, 2).contiguous()


def _check_blocks(blocks: Any, of: tuple[int, int, int], device: torch.device) -> None:
    found = validate.tensor("blocks", blocks)
    if found.dim() != 4 or found.shape[:3] != of or found.dtype not in (torch.int32, torch.int64):
        raise UnsupportedProblemError(
            f"blocks is {tuple(found.shape)} {found.dtype}; it should be {_WANTED}: with q and k_cache {(*of, 'count')}"
        )
    if found.device != device:
        raise UnsupportedProblemError(f"blocks is on {found.device}, q on {device}")


def _refuse_repeated(chosen: torch.Tensor) -> None:
    """Of blocks in order, where their values can be looked at."""
    if not validate.can_look_at(chosen):
        return
    later = chosen[..., 1:]
    repeated = later[(later == chosen[..., :-1]) & (later < _NONE)]
    if repeated.numel():
        raise UnsupportedProblemError(
            f"blocks has number {int(repeated[0])} twice for one row and head: each is there once"
        )


def _in_order(blocks: torch.Tensor, size: int, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks that have keys, the last one last, then numbers that mean none; and how many keys all have."""
    blocks = blocks.long()
    has_keys = (blocks >= 0) & (blocks * size < lengths)
    keys = (lengths - blocks * size).clamp(max=size).where(has_keys, 0).sum(-1)
    return blocks.where(has_keys, _NONE).sort(-1).values, keys


def _pages_of_heads(cache: Cache, page: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """K and V as overlapping pages of one head, which begin each `unit` elements of K, one for any key that a page may
    begin with."""
    k, v = cache.k, cache.v
    places, tokens, heads, _ = k.shape
    steps = _steps(k, page)
    unit = _divisor(*steps) or 1
    of_v = _divisor(*_steps(v, page)) or 1
    if [step // unit for step in steps] != [step // of_v for step in _steps(v, page)]:
        raise UnsupportedProblemError(
            f"k_cache has strides {k.stride()}, v_cache {v.stride()}: those of sequences, keys and heads should be in "
            "one ratio"
        )
    last = sum(step * (count - 1) for step, count in zip(steps, (places, tokens // page, heads), strict=True)) // unit
    if last > _MOST:
        raise UnsupportedProblemError(f"k_cache has {last} places where a page may begin; at most {_MOST} work")
    views = [
        x.as_strided((last + 1, page, 1, x.shape[3]), (begins, x.stride(1), x.stride(2), x.stride(3)))
        for x, begins in ((k, unit), (v, of_v))
    ]
    return views[0], views[1], unit


def _divisor(*numbers: int) -> int:
    """The greatest that all have; math.gcd takes no sizes that torch.compile calls dynamic."""
    found = 0
    for number in numbers:
        while number:
            found, number = number, found % number
    return found


def _steps(x: torch.Tensor, page: int) -> tuple[int, int, int]:
    """From sequence to sequence, page to page and head to head, in elements; 0 where there is one."""
    places, tokens, heads = x.shape[:3]
    of_place, of_key, of_head = x.stride()[:3]
    return (
        of_place if places > 1 else 0,
        of_key * page if tokens > page else 0,
        of_head if heads > 1 else 0,
    )


def _table_of(blocks: torch.Tensor, cache: Cache, size: int, page: int, unit: int) -> torch.Tensor:
    """The pages of each row and head of K, (batch, seqlen_q, heads_k, pages), int32."""
    batch, _, heads, _ = blocks.shape
    of_place, of_page, of_head = (step // unit for step in _steps(cache.k, page))
    pages = (blocks[..., None] * (size // page) + torch.arange(size // page, device=blocks.device)).flatten(3)
    a_place = cache.k.shape[1] // page  # pages in a sequence of the cache, or in a page of its block table
    places = torch.arange(batch, device=blocks.device)[:, None, None, None]
    if cache.table is not None:
        entry = (pages // a_place).clamp(max=cache.table.shape[1] - 1)
        places = cache.table[places, entry].clamp(0, cache.k.shape[0] - 1)
        pages = pages % a_place
    else:
        pages = pages.clamp(max=a_place - 1)  # those of the last block may lie behind the room
    return (places * of_place + pages * of_page + torch.arange(heads, device=blocks.device)[:, None] * of_head).int()


def _of_parts(name: str, scale: Any, parts: tuple[int, int, int]) -> Any:
    """The scale of each row and head of K, where heads have their own."""
    if not isinstance(scale, torch.Tensor) or scale.dim() < 2:
        return scale
    batch, _, heads = parts
    if scale.shape not in ((batch, heads), (1, heads)):
        raise UnsupportedProblemError(
            f"{name} is {tuple(scale.shape)}; it should be a number, (1,), {(batch, heads)} or {(1, heads)}"
        )
    return scale[:, None].expand(parts).reshape(math.prod(parts), 1)
