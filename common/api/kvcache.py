"""Decode under flash-attn's name: rows of Q against a cache of keys and values that lies in one piece or in pages.

A cache has room for more keys than it holds; how many it holds, the GPU knows. Nothing here waits for the GPU, and no
kernel reads outside of the cache, whatever lengths and tables say.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from flashladder.common.api import caches, general, given, gradients, op
from flashladder.common.api.caches import Cache
from flashladder.common.api.rotary import rotary_of
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.fp8 import FP8
from flashladder.common.problem.head_dims import CACHED_HEAD_DIMS
from flashladder.common.problem.problem import Problem
from flashladder.common.problem.rotary import Rotary
from flashladder.common.runtime import fast_path, ready
from flashladder.common.runtime.calls import Call
from flashladder.common.runtime.launch import PROBLEMS_KEPT
from flashladder.common.runtime.outputs import new_lse, new_o
from flashladder.common.runtime.plan import Plan
from flashladder.common.runtime.ready import ready_for

MOST_SPLITS = 256


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
    window_size: tuple[int, int] = general.ALL,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q, (batch, seqlen_q, heads, head_dim), over the first cache_seqlens keys of each sequence.

    k_cache and v_cache are (batch, seqlen, heads_k, head_dim); or, with a block_table (batch, max_pages) of int32,
    pages (num_pages, page_size, heads_k, head_dim) of any size. cache_seqlens is (batch), int32, or one number for all;
    None: all that there is room for. With cache_batch_idx, (batch), int32, the cache may have more sequences than q,
    and they are q's in this order. Of each sequence the first cache_leftpad keys, (batch), int32, are not seen.

    New keys `k` and `v`, (batch, seqlen_new, heads_k, head_dim), are first written behind the cached ones, in place,
    and count as cached. With rotary_cos and rotary_sin, (positions, columns / 2), they and q are turned before. New
    keys have the positions from cache_seqlens on. So have rows of q with a causal mask or a window; else all rows have
    the first of these. The tables have a position for each key that there is room for, at least; q may have rows beyond
    it, where it has more rows than there are new keys. A row beyond the last of the positions turns as that one.

    The caches may be 8-bit floats, torch.float8_e4m3fn, where q is of 16 bits. A number in them means itself times its
    head's scale: k_descale and v_descale, (batch, heads_k) or (1, heads_k), fp32, positive; None: 1. The products are
    those of 16 bits, as which these floats are exact. New keys are rounded to them; what is beyond 448 scales becomes
    that. Such caches take neither padding, windows, softcaps nor ALiBi, and on a GPU they need Hopper.

    `causal` is aligned to the end: the last row sees all keys. So are windows, which count keys to the left and right
    of a row's own (-1: all), and ALiBi. Keys are cut into `num_splits` parts, which are computed at the same time; 0:
    as the sizes of q and of the cache suggest. With a number, a row's bits depend on nothing else in the batch. Returns
    O, and with `return_softmax_lse` the log-sum-exp, (batch, heads, seqlen_q), fp32. A row that sees no key has O = 0
    and -inf.

    head_dim is 64, 96, 128 or 256. With another one, up to 256, each call copies the caches, with zeros behind their
    columns, and O and new keys are copied back; 8-bit caches are refused then.

    A length beyond the room counts as the room, and a page that is none is read as the last one, and not written to:
    what comes of either means nothing, but nothing outside is read or written. Forward only. After a first call a CUDA
    graph may capture it.

    Raises UnsupportedProblemError for tensors that do not go together, and for rotary embeddings without new keys.
    """
    asked = causal, softmax_scale, window_size, softcap, rotary_interleaved, num_splits
    if cache_batch_idx is None:
        tensors: tuple[Any, ...] = q, k_cache, v_cache, cache_seqlens, block_table, cache_leftpad, alibi_slopes
        tensors += k_descale, v_descale, k, v, rotary_cos, rotary_sin
        if (found := op.on_remembered_path(_planned, tensors, asked, return_softmax_lse)) is not None:
            return found
    given.tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    (q,) = given.contiguous_rows(q)
    given.flags(causal=causal, return_softmax_lse=return_softmax_lse, rotary_interleaved=rotary_interleaved)
    splits = given.whole("num_splits", num_splits)
    if not 0 <= splits <= MOST_SPLITS:
        raise UnsupportedProblemError(f"num_splits={splits}: must be 0, for as many as suit, or up to {MOST_SPLITS}")
    softmax_scale = None if softmax_scale is None else given.number("softmax_scale", softmax_scale)
    gradients.refuse(q, k_cache, v_cache)
    fp8 = FP8 if k_cache.dtype == FP8 else None
    cache = caches.cache_of(q, k_cache, v_cache, block_table, cache_batch_idx, fp8)
    cache = caches.scaled(cache, q, k_descale, v_descale)
    lengths = caches.lengths_of(cache_seqlens, q, cache)
    if cache_leftpad is not None:
        caches.numbers("cache_leftpad", cache_leftpad, q, cache.room, "the cache has room for")
        cache_leftpad = cache_leftpad.contiguous()
    seen = general.seen(causal, window_size, cache.room)
    slopes = general.slopes_of(alibi_slopes, q, len(q))
    bounds = (*general.window_of(seen["window"]), general.softcap_of(softcap))
    options = (seen["causal"], softmax_scale, *bounds, splits)
    rotary = rotary_of(rotary_cos, rotary_sin, rotary_interleaved, q, cache.room)
    new: tuple[Any, ...] = (None,) * 4
    if k is not None or v is not None:
        if cache_seqlens is None:
            raise UnsupportedProblemError("k and v are given, but no cache_seqlens: how many keys are there already")
        k, v = given.contiguous_rows(*caches.new_keys(k, v, q, cache, lengths))
        if cache.k_descale is None:
            new = k, v, *(rotary or (None, None, False))[:2]
        else:
            q, lengths = _append_rounded(q, cache, k, v, lengths, cache_leftpad, slopes, rotary, options)
    elif rotary:
        raise UnsupportedProblemError("rotary_cos is given, but no k and v: keys in the cache are turned already")
    rotary = rotary if new[0] is not None else None
    tensors = q, cache.k, cache.v, lengths, cache.table, cache_leftpad, slopes, cache.k_descale, cache.v_descale, *new
    if (found := op.on_remembered_path(_planned, tensors, asked, return_softmax_lse)) is not None:
        return found  # of tensors as kernels take them
    others = lengths, cache_leftpad, slopes
    has_kernel = q.shape[3] in CACHED_HEAD_DIMS or q.shape[3] > CACHED_HEAD_DIMS[-1]
    if not has_kernel and cache.k.shape[3] == q.shape[3] and cache.k_descale is None:
        o, lse = _filled_up(q, cache, others, new, rotary, options)
        return (o, lse) if return_softmax_lse else o
    o, lse = _attend(q, cache, others, new, rotary, options)
    if ready.is_gpu(q) and not op.watched():
        _remember(tensors, asked, _problem_of(q, cache, cache_leftpad, slopes, new[0], rotary, *options))
    return (o, lse) if return_softmax_lse else o


_Outputs = tuple[torch.Tensor, torch.Tensor]


def _attend(
    q: torch.Tensor,
    cache: Cache,
    others: tuple[Any, ...],
    new: tuple[Any, ...],
    rotary: Rotary | None,
    options: tuple[Any, ...],
) -> _Outputs:
    """O and the log-sum-exp; new keys are written first."""
    if new[0] is None:
        return decode(q, *cache, *others, *options)
    return append_and_decode(q, *cache, *others, *new, rotary is not None and rotary.interleaved, *options)


def _filled_up(
    q: torch.Tensor,
    cache: Cache,
    others: tuple[Any, ...],
    new: tuple[Any, ...],
    rotary: Rotary | None,
    options: tuple[Any, ...],
) -> _Outputs:
    """The same of a head_dim that no kernel has, by copies with zeros behind their columns."""
    head_dim, (causal, softmax_scale, *more) = q.shape[3], options
    columns = next(columns for columns in CACHED_HEAD_DIMS if head_dim <= columns)
    wide_q, k_cache, v_cache = (pad(x, (0, columns - head_dim)) for x in (q, cache.k, cache.v))
    wide_new = tuple(x if i > 1 or x is None else pad(x, (0, columns - head_dim)) for i, x in enumerate(new))
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    wide = cache._replace(k=k_cache, v=v_cache)
    if new[0] is not None:
        caches.check_apart(cache)
    o, lse = _attend(wide_q, wide, others, wide_new, rotary, (causal, scale, *more))
    if new[0] is not None:
        where, _ = caches.new_places(cache, others[0], new[0].shape[1])  # to another key's comes what is there
        for into, written in ((cache.k, k_cache), (cache.v, v_cache)):
            into.index_put_(where, written[where][..., :head_dim])
    return o[..., :head_dim], lse


# The plans of problems that came often, by what tensors and options say: a plan, the scale, what the log-sum-exp is
# like; and what these need.
_planned: dict[bytes, tuple[Plan, float, torch.Tensor, Call]] = {}


def _remember(tensors: tuple[Any, ...], options: tuple[Any, ...], problem: Problem) -> None:
    """That tensors and options like these are this problem, once there is a plan for it."""
    q, extension = tensors[0], fast_path.extension
    call = ready_for(problem, q).call
    plan = call and call.planned(problem, now=False)
    if extension and call and plan and (said := extension.said(tensors, options)):
        while len(_planned) >= PROBLEMS_KEPT:
            _planned.pop(next(iter(_planned)), None)
        _planned[said] = plan, problem.softmax_scale, new_lse(q), call


@torch.library.custom_op("flashladder::decode", mutates_args=())
def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    cache_seqlens: torch.Tensor,
    cache_leftpad: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    causal: bool,
    softmax_scale: float | None,
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    num_splits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and the log-sum-exp of tensors as `flash_attn_with_kvcache` takes them; lengths and padding are (batch), int32,
    slopes (batch, heads), scales (batch, heads_k), which 8-bit floats have."""
    cache = Cache(k_cache, v_cache, block_table, k_descale, v_descale)
    options = (causal, softmax_scale, window_left, window_right, softcap, num_splits)
    problem = _problem_of(q, cache, cache_leftpad, alibi_slopes, None, None, *options)
    tensors: dict[str, torch.Tensor | None]
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": cache_seqlens}
    tensors |= {"block_table": block_table, "cache_leftpad": cache_leftpad, "alibi_slopes": alibi_slopes}
    return _run(problem, tensors | {"k_descale": k_descale, "v_descale": v_descale})


@torch.library.custom_op("flashladder::append_and_decode", mutates_args=("k_cache", "v_cache"))
def append_and_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    cache_seqlens: torch.Tensor,
    cache_leftpad: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    rotary_interleaved: bool,
    causal: bool,
    softmax_scale: float | None,
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    num_splits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of a cache that new keys are written to first, which cache_seqlens does not count."""
    cache = Cache(k_cache, v_cache, block_table, k_descale, v_descale)
    rotary = None
    if rotary_cos is not None and rotary_sin is not None:
        rotary = Rotary(rotary_cos, rotary_sin, rotary_interleaved)
    options = (causal, softmax_scale, window_left, window_right, softcap, num_splits)
    problem = _problem_of(q, cache, cache_leftpad, alibi_slopes, k, rotary, *options)
    caches.check_apart(cache)
    tensors: dict[str, torch.Tensor | None]
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k_new": k, "v_new": v, "cache_seqlens": cache_seqlens}
    tensors |= {"block_table": block_table, "cache_leftpad": cache_leftpad, "alibi_slopes": alibi_slopes}
    return _run(problem, tensors | {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin})


def _append_rounded(
    q: torch.Tensor,
    cache: Cache,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    leftpad: torch.Tensor | None,
    slopes: torch.Tensor | None,
    rotary: Rotary | None,
    options: tuple[Any, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes new keys to a cache of 8-bit floats, by torch's operators; q, turned, and the lengths behind it.

    UnsupportedProblemError for what `decode` would refuse, which is too late where the cache was written to.
    """
    if not torch.compiler.is_compiling():
        problem = _problem_of(q, cache, leftpad, slopes, None, None, *options)
        ready_for(problem, q).check(problem)
        caches.check_layouts(problem, cache.k.shape, q.stride(), cache.k.stride(), cache.v.stride())
    caches.check_apart(cache)
    if rotary:
        causal, _, *window = options[:4]
        in_order = causal or tuple(window) != general.OPEN
        of_rows = caches.places(lengths, q.shape[1] if in_order else 1, cache.room)
        q = rotary.turned(q, of_rows.expand(-1, q.shape[1]))
        k = rotary.turned(k, caches.places(lengths, k.shape[1], cache.room))
    caches.append(k, v, cache, lengths)
    return q, lengths.clamp(0, cache.room) + k.shape[1]


@decode.register_fake
@append_and_decode.register_fake
def _(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return new_o(q), new_lse(q)


def _run(problem: Problem, given_tensors: dict[str, torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor]:
    """O and the log-sum-exp of tensors by their names, of which some are left out."""
    found = {name: tensor for name, tensor in given_tensors.items() if tensor is not None}
    tensors = {name: tensor if tensor.dim() == 4 else tensor.contiguous() for name, tensor in found.items()}
    o, lse = new_o(q := tensors["q"]), new_lse(q)
    ready_for(problem, q).launch(problem, tensors | {"o": o, "lse": lse})
    return o, lse


def _problem_of(
    q: torch.Tensor,
    cache: Cache,
    cache_leftpad: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    k: torch.Tensor | None,
    rotary: Rotary | None,
    causal: bool,
    softmax_scale: float | None,
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    num_splits: int,
) -> Problem:
    """What the tensors ask for; UnsupportedProblemError where that is no problem."""
    options: dict[str, Any] = {"num_splits": num_splits, "leftpad": cache_leftpad is not None}
    options["fp8_cache"] = cache.k_descale is not None
    if k is not None:
        options |= {"new_keys": True, "seqlen_new": k.shape[1]}
    if rotary is not None:
        positions, pairs = rotary.cos.shape
        options |= {"rotary": True, "rotary_dim": 2 * pairs, "rotary_positions": positions}
        options["rotary_interleaved"] = rotary.interleaved
    if cache.table is not None:
        options |= {"paged": True, "page_size": cache.k.shape[1], "num_pages": len(cache.k)}
    bounds = {"window_left": window_left, "window_right": window_right, "softcap": softcap}
    others = {**bounds, "alibi": alibi_slopes is not None, "seqlen_k": cache.room, "options": tuple(options.items())}
    return op.problem_of(q, cache.k, causal, softmax_scale, True, operation="decode", **others)


def make_ready(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, softcap: float) -> None:
    """Has made ready what a row of each sequence against such caches, in one piece, runs."""
    cache = caches.cache_of(q, k_cache, v_cache, None, None)
    problem = _problem_of(q[:, :1], cache, None, None, None, None, True, None, *general.OPEN, softcap, 0)
    ready_for(problem, q)
