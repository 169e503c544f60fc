"""Decode under flash-attn's name: rows of Q against a cache of keys and values that lies in one piece or in pages.

A cache has room for more keys than it holds; how many it holds, the GPU knows. Nothing here waits for the GPU, and no
kernel reads outside of the cache, whatever lengths and tables say.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from flashladder.common.api import general, given, gradients, op
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.problem import DTYPES, Problem
from flashladder.common.runtime import launch, overlap

RUNG, ON_HOPPER = "decode/06", "decode/07"
MOST_SPLITS = 256
_OPEN = (-1, -1)  # a window without bounds
_CACHE = "(batch, seqlen, heads_k, head_dim)"
_PAGES = "(num_pages, page_size, heads_k, head_dim) with a block_table"


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _OPEN,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q, (batch, seqlen_q, heads, head_dim), over the first cache_seqlens keys of each sequence.

    k_cache and v_cache are (batch, seqlen, heads_k, head_dim); or, with a block_table (batch, max_pages) of int32,
    pages (num_pages, page_size, heads_k, head_dim) of any size. cache_seqlens is (batch), int32, or one number for all;
    None: all that there is room for. New keys `k` and `v`, (batch, seqlen_new, heads_k, head_dim), are first written
    behind the cached ones, in place, and count as cached.

    `causal` is aligned to the end: the last row sees all keys. Keys are cut into `num_splits` parts, which are computed
    at the same time; 0: as the sizes of q and of the cache suggest. With a number, a row's bits depend on nothing else
    in the batch. Returns O, and with `return_softmax_lse` the log-sum-exp, (batch, heads, seqlen_q), fp32. A row that
    sees no key has O = 0 and -inf.

    A length beyond the room counts as the room, and a page that is none as the last one: what comes of either means
    nothing, but nothing outside is read or written. Forward only. After a first call a CUDA graph may capture it.

    Raises UnsupportedProblemError for rotary embeddings, cache_batch_idx, cache_leftpad, a window, softcap and
    alibi_slopes, which kernels do not have yet; and for tensors that do not go together.
    """
    given.tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    given.flags(causal=causal, return_softmax_lse=return_softmax_lse)
    _refuse(
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        alibi_slopes=alibi_slopes,
    )
    causal = _causal(causal, window_size)
    if not given.number("softcap", softcap) <= 0:  # NaN is refused too
        raise UnsupportedProblemError(f"softcap={softcap}: kernels for caches have none yet; softcap=0.0 works")
    splits = given.whole("num_splits", num_splits)
    if not 0 <= splits <= MOST_SPLITS:
        raise UnsupportedProblemError(f"num_splits={splits}: must be 0, for as many as suit, or up to {MOST_SPLITS}")
    softmax_scale = None if softmax_scale is None else given.number("softmax_scale", softmax_scale)
    gradients.refuse(q, k_cache, v_cache)
    _check_caches(q, k_cache, v_cache, block_table)
    lengths = _lengths(cache_seqlens, q, k_cache, block_table)
    if k is not None or v is not None:
        if cache_seqlens is None:
            raise UnsupportedProblemError("k and v are given, but no cache_seqlens: how many keys are there already")
        k, v = _new_keys(k, v, k_cache, lengths, block_table)
        _check_taken(q, k_cache, v_cache, block_table, causal, softmax_scale, splits)
        lengths = _append(k, v, k_cache, v_cache, lengths, block_table)
    o, lse = decode(q, k_cache, v_cache, lengths, block_table, causal, softmax_scale, splits)
    return (o, lse) if return_softmax_lse else o


@torch.library.custom_op("flashladder::decode", mutates_args=())
def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None,
    causal: bool,
    softmax_scale: float | None,
    num_splits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and the log-sum-exp of tensors as `flash_attn_with_kvcache` takes them; lengths are (batch), int32."""
    o, lse = _outputs(q)
    problem = _problem_of(q, k_cache, block_table, causal, softmax_scale, num_splits)
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": cache_seqlens, "o": o, "lse": lse}
    if block_table is not None:
        tensors["block_table"] = block_table.contiguous()
    op.slow_path(op.prepared(problem, q, _rung(q.device)), problem, tensors)
    return o, lse


@decode.register_fake
def _(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(q)


def _problem_of(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    causal: bool,
    softmax_scale: float | None,
    num_splits: int,
) -> Problem:
    """What the tensors ask for; UnsupportedProblemError where that is no problem."""
    options: dict[str, Any] = {"num_splits": num_splits}
    seqlen_k = k_cache.shape[1]
    if block_table is not None:
        options |= {"paged": True, "page_size": seqlen_k, "num_pages": k_cache.shape[0]}
        seqlen_k *= block_table.shape[1]
    sizes = {"operation": "decode", "seqlen_k": seqlen_k, "options": tuple(options.items())}
    return op.problem_of(q, k_cache, causal, softmax_scale, True, **sizes)


def _check_taken(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor | None, *options: Any
) -> None:
    """UnsupportedProblemError for what `decode` would refuse, which is too late where the caches were written to."""
    if torch.compiler.is_compiling():
        return
    problem = _problem_of(q, k_cache, block_table, *options)
    op.prepared(problem, q, _rung(q.device)).check(problem)
    _check_layouts(problem, k_cache.shape, q.stride(), k_cache.stride(), v_cache.stride())


@functools.lru_cache(launch.PROBLEMS_KEPT)
def _check_layouts(
    problem: Problem, of_cache: tuple[int, ...], q: tuple[int, ...], k_cache: tuple[int, ...], v_cache: tuple[int, ...]
) -> None:
    """UnsupportedProblemError where kernels do not take these strides, or new keys would be written over each other."""
    of_q = (problem.batch, problem.seqlen_q, problem.num_heads, problem.head_dim)
    layouts = {"q": (of_q, q), "k_cache": (of_cache, k_cache), "v_cache": (of_cache, v_cache)}
    alike: dict[str, Any] = {"dtype": DTYPES[problem.dtype], "device": "meta"}
    tensors = {name: torch.empty_strided(*layout, **alike) for name, layout in layouts.items()}
    launch.check(problem, Tensors(tensors, problem.asked))
    for name, strides in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not overlap.is_apart_in_itself(of_cache, strides):
            raise UnsupportedProblemError(
                f"{name} has strides {strides}, by which elements lie on each other; new keys take memory for each"
            )


@functools.cache
def _rung(device: torch.device) -> str:
    """What runs on a device."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return ON_HOPPER if is_hopper else RUNG


def _outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, seqlen_q, num_heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, num_heads, seqlen_q), dtype=torch.float32)


def _refuse(**options: object) -> None:
    """What kernels for caches do not have."""
    for name, value in options.items():
        if value is not None:
            raise UnsupportedProblemError(f"{name}: kernels for caches have none yet; {name}=None works")


def _causal(causal: bool, window_size: tuple[int, int]) -> bool:
    """The mask, of a window that hides nothing but what a causal mask hides."""
    left, right = general.pair_of("window_size", window_size, -1)
    if left >= 0 or right > 0:
        raise UnsupportedProblemError(
            f"window_size={window_size}: kernels for caches have no sliding window yet; {_OPEN} works"
        )
    return causal or right == 0


def _check_caches(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor | None
) -> None:
    """Raises UnsupportedProblemError for tensors that do not go together."""
    if q.dim() != 4:
        raise op.misshapen("q", q)
    layout = _CACHE if block_table is None else _PAGES
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dim() != 4 or cache.shape != k_cache.shape or 0 in cache.shape:
            raise UnsupportedProblemError(f"{name} has shape {tuple(cache.shape)}; both caches are {layout}")
        if (cache.dtype, cache.device) != (q.dtype, q.device):
            raise UnsupportedProblemError(
                f"{name} is {cache.dtype} on {cache.device}; like q it should be {q.dtype} on {q.device}"
            )
    if block_table is None:
        if k_cache.shape[0] != q.shape[0]:
            raise UnsupportedProblemError(f"k_cache is of {k_cache.shape[0]} sequences, q of {q.shape[0]}")
        return
    given.tensors(block_table=block_table)
    is_table = block_table.dim() == 2 and block_table.shape[0] == q.shape[0] and block_table.shape[1] > 0
    if not is_table or block_table.dtype != torch.int32 or block_table.device != q.device:
        raise UnsupportedProblemError(
            f"block_table is {tuple(block_table.shape)} {block_table.dtype} on {block_table.device}; with q it is "
            f"({q.shape[0]}, max_pages) torch.int32 on {q.device}"
        )
    if _can_look_at(block_table) and not ((block_table >= -1) & (block_table < k_cache.shape[0])).all():
        raise UnsupportedProblemError(
            f"block_table has pages {int(block_table.min())} to {int(block_table.max())}; the cache has "
            f"{k_cache.shape[0]}, from 0, and -1 is none"
        )


def _can_look_at(tensor: torch.Tensor) -> bool:
    """Whether its values can be read without waiting for a GPU."""
    return not tensor.is_cuda and not torch.compiler.is_compiling()


def _lengths(
    cache_seqlens: int | torch.Tensor | None, q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor | None
) -> torch.Tensor:
    """How many keys each sequence has: (batch), int32. UnsupportedProblemError for what cannot be so many."""
    batch, room = q.shape[0], _room(k_cache, block_table)
    if not isinstance(cache_seqlens, torch.Tensor):
        length = room if cache_seqlens is None else given.whole("cache_seqlens", cache_seqlens)
        if not 0 <= length <= room:
            raise UnsupportedProblemError(f"cache_seqlens={length}: the cache has room for 0 to {room} keys")
        return torch.full((batch,), length, dtype=torch.int32, device=q.device)
    if cache_seqlens.shape != (batch,) or cache_seqlens.dtype != torch.int32 or cache_seqlens.device != q.device:
        raise UnsupportedProblemError(
            f"cache_seqlens is {tuple(cache_seqlens.shape)} {cache_seqlens.dtype} on {cache_seqlens.device}; with q it "
            f"is ({batch},) torch.int32 on {q.device}"
        )
    if _can_look_at(cache_seqlens) and not ((cache_seqlens >= 0) & (cache_seqlens <= room)).all():
        raise UnsupportedProblemError(
            f"cache_seqlens={cache_seqlens.tolist()}: the cache has room for 0 to {room} keys"
        )
    return cache_seqlens.contiguous()


def _new_keys(
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v; UnsupportedProblemError where they do not go with the caches, or have no place there."""
    given.tensors(k=k, v=v)
    assert k is not None
    assert v is not None
    wanted = (len(lengths), k.shape[1] if k.dim() == 4 else 0, *k_cache.shape[2:])
    for name, new in (("k", k), ("v", v)):
        if tuple(new.shape) != wanted or new.dtype != k_cache.dtype or new.device != k_cache.device:
            raise UnsupportedProblemError(
                f"{name} is {tuple(new.shape)} {new.dtype} on {new.device}; with the cache it is (batch, seqlen_new, "
                f"heads_k, head_dim), {wanted[2:]} the last two, {k_cache.dtype} on {k_cache.device}"
            )
    gradients.refuse(k, v)
    room = _room(k_cache, block_table)
    if not _can_look_at(lengths):
        return k, v
    if int(lengths.max()) + k.shape[1] > room:
        raise UnsupportedProblemError(
            f"cache_seqlens={lengths.tolist()} and {k.shape[1]} new keys: the cache has room for {room} keys"
        )
    if block_table is not None and (block_table.gather(1, _places(lengths, k, room) // k_cache.shape[1]) < 0).any():
        raise UnsupportedProblemError(
            f"block_table is -1, which is no page, where new keys come to: behind cache_seqlens={lengths.tolist()}"
        )
    return k, v


def _room(k_cache: torch.Tensor, block_table: torch.Tensor | None) -> int:
    """Of a sequence, in keys."""
    return k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])


def _places(lengths: torch.Tensor, new: torch.Tensor, room: int) -> torch.Tensor:
    """Which keys of their sequences new ones become: (batch, seqlen_new)."""
    return (lengths[:, None].long() + torch.arange(new.shape[1], device=new.device)).clamp_(0, room - 1)


def _append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor | None,
) -> torch.Tensor:
    """Writes new keys behind those that are there; gives the new lengths."""
    size, last = k_cache.shape[1], k_cache.shape[0] - 1
    keys = _places(lengths, k, _room(k_cache, block_table))
    if block_table is None:
        pages = torch.arange(len(lengths), device=k.device)[:, None].expand_as(keys)
    else:
        pages = block_table.gather(1, keys // size).long().remainder_(2**32).clamp_(max=last)  # as kernels read it
        keys = keys % size
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache.index_put_((pages, keys), new)
    return lengths + k.shape[1]
