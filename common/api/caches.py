"""Caches of keys and values, in one piece or in pages: what they may be, and which new keys they take.

What the host can see without waiting for a GPU is refused here. What it cannot see leads nothing out of a cache.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from flashladder.common.api import gradients, validate
from flashladder.common.api.validate import can_look_at
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.fp8 import FP8
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import launch, overlap

_WHOLE = "(batch, seqlen, heads_k, head_dim)"
_PAGES = "(num_pages, page_size, heads_k, head_dim) with a block_table"


Scale = torch.Tensor | float | None


class Cache(NamedTuple):
    """K and V, (batch, seqlen, heads_k, head_dim); or, with a table (batch, max_pages), pages of them."""

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor | None
    k_descale: torch.Tensor | None = None  # fp32, and that of V: of 8-bit floats alone, as `scaled` has them
    v_descale: torch.Tensor | None = None


# Functions, no properties, whose values torch 2.9 does not know when it compiles.
def room_of(cache: Cache) -> int:
    """Of a sequence, in keys."""
    return cache.k.shape[1] * (1 if cache.table is None else cache.table.shape[1])


def _batch(cache: Cache) -> int:
    return (cache.k if cache.table is None else cache.table).shape[0]


def cache_of(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    dtype: torch.dtype | None = None,
    any_columns_of_v: bool = False,
) -> Cache:
    """That of the sequences of q, (batch, seqlen_q, heads, head_dim), of the type of q, unless one is given.

    With cache_batch_idx each sequence of the cache is a page, and each of q has one: nothing is copied.
    UnsupportedProblemError for what is none.
    """

    def fits(shape: torch.Size) -> bool:
        return len(shape) == 2 and not validate.surely(shape[0] != q.shape[0])

    if q.dim() != 4:
        raise validate.misshapen("q", q, validate.BATCH)
    layout = _WHOLE if block_table is None else _PAGES
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        dimensions = 3 if any_columns_of_v else 4
        if cache.dim() != 4 or validate.differ(cache.shape[:dimensions], k_cache.shape[:dimensions]):
            raise UnsupportedProblemError(f"{name} has shape {tuple(cache.shape)}; both caches are {layout}")
        if (cache.dtype, cache.device) != (wanted := (dtype or q.dtype, q.device)):
            like = "q" if dtype is None else "k_cache"
            raise UnsupportedProblemError(
                f"{name} is {cache.dtype} on {cache.device}; like {like} it should be {wanted[0]} on {wanted[1]}"
            )
    if cache_batch_idx is not None:
        if block_table is not None:
            raise UnsupportedProblemError("cache_batch_idx and block_table are given: a table says where keys lie")
        pages = numbers(
            "cache_batch_idx", cache_batch_idx, q.shape[0], q.device, k_cache.shape[0] - 1, "the cache has sequences"
        )
        return Cache(k_cache, v_cache, pages[:, None])
    if block_table is not None:
        validate.like(
            "block_table", block_table, fits, torch.int32, q.device, f"with q it is ({q.shape[0]}, max_pages)"
        )
    elif validate.surely(k_cache.shape[0] != q.shape[0]):
        raise UnsupportedProblemError(f"k_cache is of {k_cache.shape[0]} sequences, q of {q.shape[0]}")
    return Cache(k_cache, v_cache, block_table)


def scaled(cache: Cache, k_descale: Scale, v_descale: Scale) -> Cache:
    """The cache with the scales of its 8-bit floats, 1 where none is given; UnsupportedProblemError for others.

    Both are of one kind: of heads, (batch, heads_k); of pages, (num_pages, heads_k, 1); or one number, (1,).
    """
    if cache.k.dtype != FP8 and k_descale is None and v_descale is None:
        return cache
    num_pages, _, heads_k, _ = cache.k.shape
    of_heads, of_pages = (_batch(cache), heads_k), (num_pages, 1, heads_k, 1)
    shapes = [(), (1,), of_heads, (1, heads_k), *([] if cache.table is None else [of_pages, (num_pages, 1, 1, 1)])]
    fitting = f"with q it is a number, (1,), {', '.join(map(str, shapes[2:]))}, as one is for a tensor, heads or pages,"
    found: dict[str, torch.Tensor | None] = {}
    for name, descale in (("k_descale", k_descale), ("v_descale", v_descale)):
        if descale is None:
            found[name] = None
            continue
        if cache.k.dtype != FP8:
            raise UnsupportedProblemError(f"{name} is given, but k_cache is {cache.k.dtype}: scales are those of {FP8}")
        if not isinstance(descale, torch.Tensor):
            descale = cache.k.new_full((), validate.number(name, descale), dtype=torch.float32)
        validate.like(name, descale, lambda shape: _is_among(shape, shapes), torch.float32, cache.k.device, fitting)
        if can_look_at(descale) and not ((descale > 0) & descale.isfinite()).all():
            raise UnsupportedProblemError(f"{name}={descale.tolist()}: a scale is a positive, finite number")
        found[name] = descale.reshape(1) if descale.dim() < 2 else descale
    ranks = {descale.dim() for descale in found.values() if descale is not None}
    shape = of_pages if 4 in ranks else (1,) if ranks == {1} else of_heads
    if {2, 4} <= ranks:
        raise UnsupportedProblemError("k_descale and v_descale: one is of pages, one of heads; both are of one kind")
    scales = (cache.k.new_ones(shape, dtype=torch.float32) if x is None else x.expand(shape) for x in found.values())
    k_scales, v_scales = (x.reshape(num_pages, heads_k, 1) if 4 in ranks else x.contiguous() for x in scales)
    return cache._replace(k_descale=k_scales, v_descale=v_scales)


def scales_of(descale: torch.Tensor | None) -> dict[str, Any]:
    """What scales say of a problem, as options: of 8-bit floats, by their dimensions, or nothing."""
    if descale is None:
        return {}
    return {"fp8_cache": True, "tensor_scales": descale.dim() == 1, "page_scales": descale.dim() == 3}


def _is_among(shape: torch.Size, shapes: Sequence[Sequence[int]]) -> bool:
    for other in shapes:  # noqa: SIM110 - not every torch traces a generator here
        if not validate.differ(shape, other):
            return True
    return False


def check_pages(cache: Cache, lengths: torch.Tensor, begin: torch.Tensor | int = 0, *, least: int = -1) -> None:
    """UnsupportedProblemError where the page of one of so many keys, (batch), is no number of a page, from `least` on.

    Entries behind them, and before key `begin`, may be anything.
    """
    if cache.table is None or not can_look_at(cache.table):
        return
    num_pages, page_size = cache.k.shape[:2]
    first = page_size * torch.arange(cache.table.shape[1])
    used = cache.table[(first < lengths[:, None]) & (first + page_size > torch.as_tensor(begin).reshape(-1, 1))]
    if not ((used >= least) & (used < num_pages)).all():
        raise UnsupportedProblemError(
            f"block_table has pages {int(used.min())} to {int(used.max())}; the cache has {num_pages}, from 0, and -1 "
            "is none"
        )


def first_seen(lengths: torch.Tensor, rows: int, window_left: int | None, leftpad: torch.Tensor | None) -> torch.Tensor:
    """The first key of each sequence, (batch), that one of its last rows sees; no page before its own is read."""
    first = torch.zeros_like(lengths) if window_left is None else (lengths - rows - window_left).clamp(min=0)
    return first if leftpad is None else torch.maximum(first, leftpad)


def numbers(name: str, value: object, batch: int, device: torch.device, most: int, what: str) -> torch.Tensor:
    """Numbers from 0 to `most`, (batch), int32, contiguous: one for each sequence of q, on its device.

    UnsupportedProblemError for what are none.
    """
    fitting = f"with q it is ({batch},)"
    found = validate.like(name, value, lambda shape: _is_among(shape, [(batch,)]), torch.int32, device, fitting)
    if can_look_at(found) and not ((found >= 0) & (found <= most)).all():
        raise UnsupportedProblemError(f"{name}={found.tolist()}: {what} 0 to {most}")
    return found.contiguous()


def numbers_of(name: str, value: object, cache: Cache) -> torch.Tensor:
    """The same, each of keys of a sequence that the cache has room for."""
    return numbers(name, value, _batch(cache), cache.k.device, room_of(cache), "the cache has room for")


def lengths_of(cache_seqlens: int | torch.Tensor | None, cache: Cache) -> torch.Tensor:
    """How many keys each sequence has: (batch), int32. UnsupportedProblemError for what cannot be so many."""
    if isinstance(cache_seqlens, torch.Tensor):
        return numbers_of("cache_seqlens", cache_seqlens, cache)
    wanted = "a whole number, or a tensor (batch,) of torch.int32"
    length = room_of(cache) if cache_seqlens is None else validate.whole("cache_seqlens", cache_seqlens, wanted)
    if validate.surely(length < 0) or validate.surely(length > room_of(cache)):
        raise UnsupportedProblemError(f"cache_seqlens={length}: the cache has room for 0 to {room_of(cache)} keys")
    if torch.compiler.is_compiling():
        torch._check(length >= 0)
        torch._check(length <= room_of(cache))
    return torch.full((_batch(cache),), length, dtype=torch.int32, device=cache.k.device)


def tree_of(tree_mask: object, q: torch.Tensor) -> torch.Tensor:
    """The masks of rows of a draft tree, (batch, seqlen_q), int32, contiguous. UnsupportedProblemError for others."""
    shape = tuple(q.shape[:2])
    found = validate.like(
        "tree_mask", tree_mask, lambda given: _is_among(given, [shape]), torch.int32, q.device, f"with q it is {shape}"
    )
    return found.contiguous()


def new_keys(
    k: torch.Tensor | None, v: torch.Tensor | None, q: torch.Tensor, cache: Cache, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v. UnsupportedProblemError for new keys that do not go with q and the cache, or have no place there."""
    k, v = validate.tensors(k=k, v=v)
    of_heads = tuple(cache.k.shape[2:])
    shape_of_both = (lengths.shape[0], k.shape[1] if k.dim() == 4 else 0, *of_heads)
    wanted = f"with the cache it is (batch, seqlen_new, heads_k, head_dim), {of_heads} the last two,"
    for name, new in (("k", k), ("v", v)):
        validate.like(name, new, lambda shape: _is_among(shape, [shape_of_both]), q.dtype, cache.k.device, wanted)
    gradients.refuse(k, v)
    if not (can_look_at(lengths) and lengths.numel()):
        return k, v
    if int(lengths.max()) + k.shape[1] > room_of(cache):
        raise UnsupportedProblemError(
            f"cache_seqlens={lengths.tolist()} and {k.shape[1]} new keys: the cache has room for {room_of(cache)} keys"
        )
    check_pages(cache, lengths + k.shape[1], lengths)
    if not new_places(cache, lengths, k.shape[1])[1].all():
        raise UnsupportedProblemError(
            f"block_table is -1, which is no page, where new keys come to: behind cache_seqlens={lengths.tolist()}"
        )
    return k, v


@functools.lru_cache(launch.PROBLEMS_KEPT)
def check_layouts(
    problem: Problem, of_cache: tuple[int, ...], k_cache: tuple[int, ...], v_cache: tuple[int, ...]
) -> None:
    """UnsupportedProblemError where kernels do not take these strides."""
    layouts = {"k_cache": (of_cache, k_cache), "v_cache": (of_cache, v_cache)}
    tensors = {
        name: torch.empty_strided(*layout, dtype=problem.tensors[name].dtype, device="meta")
        for name, layout in layouts.items()
    }
    launch.check(problem, tensors)


def check_apart(cache: Cache, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """UnsupportedProblemError where new keys would be written over each other, or over one of the tensors of a call."""
    written = {"k_cache": cache.k, "v_cache": cache.v}
    for name, tensor in written.items():
        if not overlap.is_apart_in_itself(tensor.shape, tensor.stride()):
            raise UnsupportedProblemError(
                f"{name} has strides {tensor.stride()}, by which elements lie on each other; new keys take memory for "
                "each"
            )
        for other, x in {**written, **tensors}.items() if validate.has_memory(tensor) else ():
            if x is not None and other != name and overlap.share(tensor, x):
                raise UnsupportedProblemError(
                    f"{name} shares memory with {other.removesuffix('_new')}; where new keys are written, it takes "
                    "memory of its own"
                )


def places(lengths: torch.Tensor, new: int, room: int) -> torch.Tensor:
    """Which keys of their sequences so many new ones become, (batch, new); from `room` on there is no memory."""
    return lengths.clamp(0, room)[:, None].long() + torch.arange(new, device=lengths.device)


def pages_of(
    cache: Cache, sequences: torch.Tensor, keys: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The page and the row in it of each of some keys, and whether there is such a page.

    If there is none it is the last one, as kernels read it.
    """
    if cache.table is None:
        return (sequences, keys), torch.ones_like(keys, dtype=torch.bool)
    num_pages, page_size = cache.k.shape[:2]
    numbers = cache.table[sequences, keys // page_size].long()
    pages = numbers.remainder(2**32).clamp_(max=num_pages - 1)
    return (pages, keys % page_size), pages == numbers


def new_places(cache: Cache, lengths: torch.Tensor, new: int) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The page and the row in it of each of so many new keys of each sequence, (batch * new), and whether it has them.

    If it has none they are another key's.
    """
    keys = places(lengths, new, room_of(cache)).flatten()
    sequences = torch.arange(lengths.shape[0], device=keys.device)[:, None].expand(-1, new).flatten()
    where, is_page = pages_of(cache, sequences, keys.clamp(max=room_of(cache) - 1))
    return where, is_page & (keys < room_of(cache))
