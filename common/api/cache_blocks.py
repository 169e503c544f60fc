"""Decode over blocks of a cache that each row chooses, as MiniMax-M3 does."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashladder.common.api import caches, gradients, kvcache, validate
from flashladder.common.api.caches import Cache
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.config import listing
from flashladder.common.problem.head_dims import CACHED_HEAD_DIMS
from flashladder.common.runtime import ready
from flashladder.common.runtime.outputs import new_lse, new_o

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
    heads. On a GPU nothing of the cache is copied; tables are made by torch's operators, some 30, on the device. Pages
    have as many keys as divide block_size and the cache's pages (without a block_table, its room): 64 or more are fast.
    K and V are strided alike, as far as sequences, keys and heads go, and have head_dim 64, 96, 128 or 256. On the CPU
    the emulator copies pages that overlap, so it is for small caches. Forward only. After a first call a CUDA graph may
    capture it.

    Raises UnsupportedProblemError for tensors that do not go together, and on the CPU for a block that is there twice
    and for a page that the cache has not.
    """
    q, k_cache, v_cache = validate.tensors(validate.BATCH, q=q, k_cache=k_cache, v_cache=v_cache)
    size = validate.whole("block_size", block_size)
    if size < 1:
        raise UnsupportedProblemError(f"block_size={size}: must be at least 1")
    cache = caches.cache_of(q, k_cache, v_cache, block_table, None, k_cache.dtype)
    batch, rows, heads, head_dim = q.shape
    heads_k, head_dim_v = k_cache.shape[2], v_cache.shape[3]
    if not heads_k or heads % heads_k:
        raise UnsupportedProblemError(f"heads={heads} must be a multiple of heads_k={heads_k}")
    if head_dim not in CACHED_HEAD_DIMS or head_dim_v != head_dim:
        raise UnsupportedProblemError(
            f"q has head_dim {head_dim}, v_cache {head_dim_v}: kernels take {listing(CACHED_HEAD_DIMS)}, of both, and "
            "with another one the cache would be copied"
        )
    _check_blocks(blocks, (batch, rows, heads_k), q.device)
    if out is not None:
        ready.check_out(validate.tensor("out", out), q, head_dim_v)
        if validate.has_memory(out):
            ready.check_apart(out, {"q": q, "k_cache": k_cache, "v_cache": v_cache})
    gradients.refuse(q, k_cache, v_cache)
    cache = caches.scaled(cache, k_descale, v_descale)
    if cache.k_descale is not None and cache.k_descale.dim() == 3:
        raise UnsupportedProblemError("k_descale and v_descale are of pages; here they are numbers, (1,), or of heads")
    o, lse = _computed(
        q,
        k_cache,
        v_cache,
        blocks,
        size,
        caches.lengths_of(cache_seqlens, cache),
        block_table,
        validate.scale(softmax_scale),
        validate.flag("causal", causal),
        validate.softcap(softcap),
        cache.k_descale,
        cache.v_descale,
    )
    if out is not None:
        o = out.copy_(o)
    return (o, lse) if validate.flag("return_softmax_lse", return_softmax_lse) else o


@torch.library.custom_op("flashladder::decode_blocks", mutates_args=())
def _computed(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    blocks: torch.Tensor,
    size: int,
    lengths: torch.Tensor,
    block_table: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    softcap: float,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """An operator, as strides that torch.compile calls dynamic have no greatest divisor."""
    cache = Cache(k_cache, v_cache, block_table)
    batch, rows, heads, _ = q.shape
    heads_k, room = k_cache.shape[2], caches.room_of(cache)
    if not (room and k_cache.numel() and q.numel()):
        return new_o(q, q.shape[3]).zero_(), new_lse(q).fill_(-math.inf)
    own = lengths.clamp(max=room).view(-1, 1, 1, 1)
    if causal:  # the last row sees all keys
        own = own - torch.arange(rows - 1, -1, -1, device=q.device)[:, None, None]
    size = min(size, room)
    chosen, num_keys = _in_order(blocks, size, own.expand(batch, rows, heads_k, 1))
    _refuse_repeated(chosen)
    page = math.gcd(size, k_cache.shape[1])
    k_pages, v_pages, unit = _pages_of_heads(cache, page)
    table = _table_of(chosen, cache, size, page, unit, own)
    parts = batch * rows * heads_k
    o, lse = kvcache.flash_attn_with_kvcache(
        q.reshape(parts, 1, heads // heads_k, q.shape[3]),
        k_pages,
        v_pages,
        cache_seqlens=num_keys.reshape(parts).int(),
        block_table=table.reshape(parts, table.shape[3]),
        softmax_scale=softmax_scale,
        softcap=softcap,
        return_softmax_lse=True,
        k_descale=_of_parts(k_descale, (batch, rows, heads_k)),
        v_descale=_of_parts(v_descale, (batch, rows, heads_k)),
    )
    return o.view(q.shape), lse.view(batch, rows, heads).transpose(1, 2).contiguous()


@_computed.register_fake
def _(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return new_o(q, q.shape[3]), new_lse(q)


def _check_blocks(blocks: Any, of: tuple[int, int, int], device: torch.device) -> None:
    found = validate.tensor("blocks", blocks)
    if found.dim() != 4 or found.shape[:3] != of or found.dtype not in (torch.int32, torch.int64):
        raise UnsupportedProblemError(
            f"blocks is {tuple(found.shape)} {found.dtype}; it should be (batch, seqlen_q, heads_k, count), "
            f"torch.int32 or torch.int64: with q and k_cache {(*of, 'count')}"
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
    has_keys = (blocks >= 0) & (blocks < (lengths + size - 1) // size)
    keys = (lengths - blocks.where(has_keys, 0) * size).clamp(max=size).where(has_keys, 0).sum(-1)
    return blocks.where(has_keys, _NONE).sort(-1).values, keys


def _pages_of_heads(cache: Cache, page: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """K and V as pages of one head, which may overlap, and after how many elements of K the next one begins: that
    divides all distances between pages, so that each page of each head has a number."""
    k, v = cache.k, cache.v
    places, tokens, heads, _ = k.shape
    steps, steps_of_v = _steps(k, page), _steps(v, page)
    unit, unit_of_v = math.gcd(*steps) or 1, math.gcd(*steps_of_v) or 1
    if [step // unit for step in steps] != [step // unit_of_v for step in steps_of_v]:
        raise UnsupportedProblemError(
            f"k_cache has strides {k.stride()}, v_cache {v.stride()}: those of sequences, keys and heads should be in "
            "one ratio"
        )
    last = sum(step * (count - 1) for step, count in zip(steps, (places, tokens // page, heads), strict=True)) // unit
    if last >= _MOST:
        raise UnsupportedProblemError(f"k_cache has {last} places where a page may begin; at most {_MOST} work")
    views = [
        x.as_strided((last + 1, page, 1, x.shape[3]), (begins, x.stride(1), x.stride(2), x.stride(3)))
        for x, begins in ((k, unit), (v, unit_of_v))
    ]
    return views[0], views[1], unit


def _steps(x: torch.Tensor, page: int) -> tuple[int, int, int]:
    """From sequence to sequence, page to page and head to head, in elements; 0 where there is one."""
    places, tokens, heads = x.shape[:3]
    of_place, of_key, of_head = x.stride()[:3]
    return (
        of_place if places > 1 else 0,
        of_key * page if tokens > page else 0,
        of_head if heads > 1 else 0,
    )


def _table_of(
    chosen: torch.Tensor, cache: Cache, size: int, page: int, unit: int, lengths: torch.Tensor
) -> torch.Tensor:
    """The pages of each row and head of K, (batch, seqlen_q, heads_k, pages), int32."""
    batch, _, heads, _ = chosen.shape
    of_place, of_page, of_head = (step // unit for step in _steps(cache.k, page))
    blocks = chosen.where(chosen < _NONE, lengths.long() // size + 1)  # one that has no keys
    pages = (blocks[..., None] * (size // page) + torch.arange(size // page, device=blocks.device)).flatten(3)
    has_keys = pages * page < lengths
    a_place = cache.k.shape[1] // page  # pages in a sequence of the cache, or in a page of its block table
    places = torch.arange(batch, device=blocks.device)[:, None, None, None]
    if cache.table is not None:
        places = cache.table[places, (pages // a_place).where(has_keys, 0)]
        num_places = cache.k.shape[0]
        is_one = (places >= 0) & (places < num_places)
        if validate.can_look_at(places) and (wrong := places[has_keys & ~is_one & (places != -1)]).numel():
            raise UnsupportedProblemError(f"block_table has page {int(wrong[0])}; the cache has {num_places}, from 0")
        places = places.where(is_one, num_places - 1)  # as kernels read what is none
    pages = (pages % a_place).where(has_keys, 0)
    return (places * of_place + pages * of_page + torch.arange(heads, device=blocks.device)[:, None] * of_head).int()


def _of_parts(scale: torch.Tensor | None, parts: tuple[int, int, int]) -> torch.Tensor | None:
    """That of each row and head of K, where heads have their own."""
    if scale is None or scale.dim() < 2:
        return scale
    return scale[:, None].expand(parts).reshape(math.prod(parts), 1)
