"""Decode under flash-attn's name: rows of Q against a cache of keys and values that lies in one piece or in pages.

A cache has room for more keys than it holds; how many it holds, the GPU knows. Nothing here waits for the GPU, and no
kernel reads outside of the cache, whatever lengths and tables say.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from flashladder.common.api import caches, flops, gradients, operator, validate
from flashladder.common.api.caches import Cache
from flashladder.common.api.options import Flat, problem_of
from flashladder.common.api.rotary import rotary_of
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.fp8 import FP8
from flashladder.common.problem.head_dims import CACHED_HEAD_DIMS
from flashladder.common.problem.problem import LSE, Problem
from flashladder.common.problem.rotary import Rotary
from flashladder.common.runtime import ready
from flashladder.common.runtime.outputs import new_lse, new_o, new_outputs, shape_of_lse

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
    window_size: tuple[int, int] = validate.ALL,
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
    pages (num_pages, page_size, heads_k, head_dim) of any size. Entries of the table behind a sequence's keys may be
    anything. cache_seqlens is (batch), int32, or one number for all; None: all that there is room for. With
    cache_batch_idx, (batch), int32, the cache may have more sequences than q, and they are q's in this order. Of each
    sequence the first cache_leftpad keys, (batch), int32, are not seen.

    New keys `k` and `v`, (batch, seqlen_new, heads_k, head_dim), are first written behind the cached ones, in place,
    and count as cached. With rotary_cos and rotary_sin, (positions, columns / 2), they and q are turned before. New
    keys have the positions from cache_seqlens on. So have rows of q with a causal mask or a window; else all rows have
    the first of these. The tables have a position for each key that there is room for, at least; q may have rows beyond
    it, where it has more rows than there are new keys. A row beyond the last of the positions turns as that one. Where
    there are new keys, each cache has memory that no other tensor of the call has. There may be none of them, no rows,
    no sequences and no room.

    The caches may be 8-bit floats, torch.float8_e4m3fn, where q is of 16 bits. A number in them means itself times its
    head's scale: k_descale and v_descale, (batch, heads_k) or (1, heads_k), fp32, positive; None: 1. The products are
    those of 16 bits, as which these floats are exact. New keys are rounded to them; what is beyond 448 scales becomes
    that. Such caches take neither padding, windows, softcaps nor ALiBi, and on a GPU they need Hopper.

    `causal` is aligned to the end: the last row sees all keys. So are windows, which count keys to the left and right
    of a row's own (-1: all), and ALiBi. Keys are cut into `num_splits` parts, which are computed at the same time; 0:
    as the sizes of q and of the cache suggest. With a number, a row's bits depend on nothing else in the batch. Returns
    O, and with `return_softmax_lse` the log-sum-exp, (batch, heads, seqlen_q), fp32. A row that sees no key has O = 0
    and -inf.

    The caches have strides that are multiples of 16 bytes, and the last is 1; others are refused. q, k and v may have
    any strides: they are copied where need be.

    head_dim is 64, 96, 128 or 256. With another one, up to 256, each call copies the caches, with zeros behind their
    columns, and O and new keys are copied back; 8-bit caches are refused then.

    A length beyond the room counts as the room, and a page that is none is read as the last one, and not written to:
    what comes of either means nothing, but nothing outside is read or written. Under torch.autocast q, new keys and
    tables are cast to its type where one of them is of fp32; caches are not. Forward only. After a first call a CUDA
    graph may capture it.

    Raises UnsupportedProblemError for tensors that do not go together, for caches that share memory with each other or
    with new keys where these are written, and for rotary embeddings without k and v.
    """
    given = causal, softmax_scale, window_size, softcap, rotary_interleaved, num_splits
    if (cpp := operator.in_cpp()) and cache_batch_idx is None and isinstance(cache_seqlens, torch.Tensor):
        tensors: tuple[Any, ...] = q, k_cache, v_cache, cache_seqlens, block_table, cache_leftpad, alibi_slopes
        tensors += k_descale, v_descale, k, v, rotary_cos, rotary_sin
        outputs = cpp.remembered(operator.onlookers, _planned, tensors, given, return_softmax_lse)
        if outputs is not None:
            return outputs
    q, k, v, rotary_cos, rotary_sin = validate.floats(q=q, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    k_cache, v_cache = validate.tensors(k_cache=k_cache, v_cache=v_cache)
    causal = validate.flag("causal", causal)
    return_softmax_lse = validate.flag("return_softmax_lse", return_softmax_lse)
    rotary_interleaved = validate.flag("rotary_interleaved", rotary_interleaved)
    splits = validate.whole("num_splits", num_splits)
    if validate.surely(splits < 0) or validate.surely(splits > MOST_SPLITS):
        raise UnsupportedProblemError(f"num_splits={splits}: must be 0, for as many as suit, or up to {MOST_SPLITS}")
    scale = validate.scale(softmax_scale)
    gradients.refuse(q, k_cache, v_cache)
    fp8 = FP8 if k_cache.dtype == FP8 else None
    cache = caches.cache_of(q, k_cache, v_cache, block_table, cache_batch_idx, fp8)
    cache = caches.scaled(cache, k_descale, v_descale)
    lengths = caches.lengths_of(cache_seqlens, cache)
    caches.check_pages(cache, lengths)
    if cache_leftpad is not None:
        cache_leftpad = caches.numbers_of("cache_leftpad", cache_leftpad, cache)
    if not validate.is_same(window_size, validate.ALL):
        window_size = validate.pair("window_size", window_size, -1)
    is_causal, window = validate.mask(causal, window_size, caches.room_of(cache))
    left, right = validate.window(window, is_causal)
    rotary: Rotary | None = None
    if rotary_cos is not None or rotary_sin is not None:
        rotary = rotary_of(rotary_cos, rotary_sin, rotary_interleaved, q, caches.room_of(cache))
    new: dict[str, Any] = {}
    in_kernel = False
    if k is not None or v is not None:
        if cache_seqlens is None:
            raise UnsupportedProblemError("k and v are given, but no cache_seqlens: how many keys are there already")
        k, v = caches.new_keys(k, v, q, cache, lengths)
        in_kernel = not (fp8 or validate.surely(q.numel() == 0) or validate.surely(k.numel() == 0))
        new = _written(k, v, rotary) if in_kernel else {}
    elif rotary:
        raise UnsupportedProblemError("rotary_cos is given, but no k and v: keys in the cache are turned already")
    step = Step(
        q,
        *cache,
        lengths,
        cache_leftpad,
        None if alibi_slopes is None else validate.slopes(alibi_slopes, q.device, q.shape[0], q.shape[2]),
        causal=is_causal,
        softmax_scale=scale,
        window_left=left,
        window_right=right,
        softcap=validate.softcap(softcap),
        num_splits=splits,
        **new,
    )
    if k is not None and v is not None and not in_kernel:
        step = _appended(step, k, v, rotary)
    validated = causal, scale, window_size, step.softcap, rotary_interleaved, splits
    if cpp:
        tensors = tuple(step.tensors.values())
        outputs = cpp.remembered(operator.onlookers, _planned, tensors, validated, return_softmax_lse)
        if outputs is not None:
            return outputs
    if _has_kernel(step):
        o, lse = _attend(step)
        if ready.is_gpu(q.device) and q.numel() and k_cache.numel() and not operator.is_observed():
            _remember(step, given, validated)
    else:
        o, lse = _attend_padded(step)
    return (o, lse) if return_softmax_lse else o


@dataclass  # not frozen: to make one that is takes 3 us more of each call
class Step(Flat):
    """A call, as kernels take it: numbers are (batch), int32, slopes (batch, heads); 8-bit floats have scales, (batch,
    heads_k). New keys are written first, and cache_seqlens does not count them."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor | None
    k_descale: torch.Tensor | None
    v_descale: torch.Tensor | None
    cache_seqlens: torch.Tensor
    cache_leftpad: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    rotary_cos: torch.Tensor | None = None
    rotary_sin: torch.Tensor | None = None
    rotary_interleaved: bool = False
    causal: bool = False
    softmax_scale: float | None = None
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    num_splits: int = 0

    @property
    def cache(self) -> Cache:
        """What it reads."""
        return Cache(self.k_cache, self.v_cache, self.block_table, self.k_descale, self.v_descale)

    @property
    def tensors(self) -> dict[str, torch.Tensor | None]:
        """The inputs in the operation's order, by its names; None for what is left out."""
        return {
            "q": self.q,
            "k_cache": self.k_cache,
            "v_cache": self.v_cache,
            "cache_seqlens": self.cache_seqlens,
            "block_table": self.block_table,
            "cache_leftpad": self.cache_leftpad,
            "alibi_slopes": self.alibi_slopes,
            "k_descale": self.k_descale,
            "v_descale": self.v_descale,
            "k_new": self.k,
            "v_new": self.v,
            "rotary_cos": self.rotary_cos,
            "rotary_sin": self.rotary_sin,
        }

    @property
    def problem(self) -> Problem:
        """UnsupportedProblemError where it is none."""
        options: dict[str, Any] = {"num_splits": self.num_splits, "leftpad": self.cache_leftpad is not None}
        options["fp8_cache"] = self.k_descale is not None
        if self.k is not None:
            options |= {"new_keys": True, "seqlen_new": self.k.shape[1]}
        if self.rotary_cos is not None:
            positions, pairs = self.rotary_cos.shape
            options |= {"rotary": True, "rotary_dim": 2 * pairs, "rotary_positions": positions}
            options["rotary_interleaved"] = self.rotary_interleaved
        if self.block_table is not None:
            options |= {"paged": True, "page_size": max(1, self.k_cache.shape[1]), "num_pages": self.k_cache.shape[0]}
        return problem_of(
            self.q,
            self.k_cache,
            operation="decode",
            seqlen_k=caches.room_of(self.cache),
            causal=self.causal,
            softmax_scale=self.softmax_scale,
            window_left=self.window_left,
            window_right=self.window_right,
            softcap=self.softcap,
            alibi=self.alibi_slopes is not None,
            lse=True,
            options=tuple(options.items()),
        )


_FIELDS = tuple(field.name for field in dataclasses.fields(Step))


_Outputs = tuple[torch.Tensor, torch.Tensor]


def _written(k: torch.Tensor, v: torch.Tensor, rotary: Rotary | None) -> dict[str, Any]:
    """What a step has that writes new keys, by name."""
    tables = {} if rotary is None else {f"rotary_{name}": value for name, value in rotary._asdict().items()}
    return {"k": k, "v": v, **tables}


def _has_kernel(step: Step) -> bool:
    """Whether a kernel takes it as it is, or none takes it at all, which is refused later."""
    head_dim = step.q.shape[3]
    is_wide = head_dim in CACHED_HEAD_DIMS or head_dim > CACHED_HEAD_DIMS[-1]
    return is_wide or step.k_cache.shape[3] != head_dim or step.k_descale is not None


def _attend(step: Step) -> _Outputs:
    """O and the log-sum-exp."""
    flops.tell()
    o, lse = (decode if step.k is None else append_and_decode)(*[getattr(step, name) for name in _FIELDS])
    return o, lse


def _attend_padded(step: Step) -> _Outputs:
    """The same of a head_dim that no kernel has, by copies with zeros behind their columns."""
    head_dim, cache, new = step.q.shape[3], step.cache, step.k
    columns = next(columns for columns in CACHED_HEAD_DIMS if head_dim <= columns)
    narrow = {"q": step.q, "k_cache": step.k_cache, "v_cache": step.v_cache, "k": step.k, "v": step.v}
    wide = {name: None if x is None else pad(x, (0, columns - head_dim)) for name, x in narrow.items()}
    scale = head_dim**-0.5 if step.softmax_scale is None else step.softmax_scale
    if new is not None:
        caches.check_apart(cache, step.tensors)
    padded = dataclasses.replace(step, softmax_scale=scale, **wide)  # type: ignore[arg-type]
    o, lse = _attend(padded)
    if new is not None:
        where, _ = caches.new_places(cache, step.cache_seqlens, new.shape[1])  # to another key's comes what is there
        for into, written in ((cache.k, padded.k_cache), (cache.v, padded.v_cache)):
            into.index_put_(where, written[where][..., :head_dim])
    return o[..., :head_dim], lse


def _appended(step: Step, k: torch.Tensor, v: torch.Tensor, rotary: Rotary | None) -> Step:
    """The step that is left, whose q is turned, when torch's operators have written new keys: to 8-bit floats, or where
    there are none, or q is empty.

    UnsupportedProblemError for what `decode` would refuse, which is too late where the cache was written to.
    """
    cache, q, lengths = step.cache, step.q, step.cache_seqlens
    if not torch.compiler.is_compiling():
        problem = step.problem
        ready.choice_for(problem, q.device)
        if cache.k.numel():
            caches.check_layouts(problem, cache.k.shape, cache.k.stride(), cache.v.stride())
    if k.numel():
        caches.check_apart(cache, {**step.tensors, "k_new": k, "v_new": v})
    if rotary:
        in_order = step.causal or (step.window_left, step.window_right) != validate.OPEN
        of_rows = caches.places(lengths, q.shape[1] if in_order else 1, caches.room_of(cache))
        q = rotary.turned(q, of_rows.expand(-1, q.shape[1]))
        k = rotary.turned(k, caches.places(lengths, k.shape[1], caches.room_of(cache)))
    caches.append(k, v, cache, lengths)
    return dataclasses.replace(step, q=q, cache_seqlens=lengths.clamp(0, caches.room_of(cache)) + k.shape[1])


def _decode(*values: Any) -> _Outputs:
    step = Step(*values)
    problem = step.problem
    if step.k is not None:
        caches.check_apart(step.cache, step.tensors)
    outputs = new_outputs(problem, step.q)
    operator.launch(problem, step.tensors | outputs)
    return outputs["o"], outputs[LSE]


decode = torch.library.custom_op(
    "flashladder::decode", _decode, mutates_args=(), schema=f"({Step.schema()}) -> (Tensor, Tensor)"
)
append_and_decode = torch.library.custom_op(
    "flashladder::append_and_decode",
    _decode,
    mutates_args=("k_cache", "v_cache"),
    schema=f"({Step.schema(k_cache='Tensor(a!)', v_cache='Tensor(b!)')}) -> (Tensor, Tensor)",
)


@decode.register_fake
@append_and_decode.register_fake
def _(q: torch.Tensor, *_: Any) -> _Outputs:
    return new_o(q), new_lse(q)


@flops.formula("decode", "append_and_decode")
def _(*values: Any) -> int:
    step = Step(*values)
    new = 0 if step.k is None else step.k.shape[1]
    lengths = flops.lengths(step.cache_seqlens, caches.room_of(step.cache))
    keys = sum(min(length + new, caches.room_of(step.cache)) for length in lengths)
    return 2 * keys * step.q.shape[1] * step.q.shape[2] * 2 * step.q.shape[3]


# The plans of problems that came often, as fast_path.cpp finds them, each with the shape of the log-sum-exp.
_planned: dict[bytes, tuple[Any, ...]] = {}


def _remember(step: Step, *asked: tuple[Any, ...]) -> None:
    """That tensors like these and any of what is `asked` for are this problem."""
    problem = step.problem
    call = ready.ready_for(problem, step.q.device).call
    operator.remember(_planned, call, problem, tuple(step.tensors.values()), *asked, kept=(shape_of_lse(step.q),))


def make_ready(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, softcap: float) -> None:
    """Has made ready what a row of each sequence against such caches, in one piece, runs."""
    cache = caches.cache_of(q, k_cache, v_cache, None, None)
    lengths = caches.lengths_of(None, cache)
    step = Step(q[:, :1], *cache, lengths, causal=True, softcap=softcap)
    ready.ready_for(step.problem, q.device)
