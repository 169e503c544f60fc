"""Rows of many sequences against pages of keys, by a kernel that finds its rows, lengths and pages on the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashladder.common.api import caches, flops, gradients, operator, sequences, validate
from flashladder.common.api.caches import Cache, Scale, scales_of
from flashladder.common.api.options import Flat, problem_of
from flashladder.common.api.validate import PACKED, can_look_at
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.fp8 import FP8
from flashladder.common.problem.problem import LSE, Problem
from flashladder.common.runtime.outputs import new_lse, new_o, new_outputs

_Outputs = tuple[torch.Tensor, torch.Tensor]


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool,
    softmax_scale: float | None,
    window_size: tuple[int, int] | torch.Tensor,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_descale: Scale,
    v_descale: Scale,
    num_splits: int,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O, which is `out` if that is given, and the log-sum-exp, (heads, total_q).

    q is (total_q, heads, head_dim), k and v are pages, (num_pages, page_size, heads_k, head_dim); v, and O with it, may
    have fewer columns. Keys i * page_size to
    (i + 1) * page_size of sequence b are page block_table[b, i]. It has seqused_k[b] keys, or where that is left out as
    many as cu_seqlens_k says. With seqused_q only its first seqused_q[b] rows are rows: the others see no key. Rows are
    copied then, and O too. All of these may be int32, or int64, which a kernel before the first makes int32. Pages of
    8-bit floats have scales, as flash_attn_with_kvcache takes them.

    Nothing of them is read on the host where they are on a GPU, so nothing waits, and a CUDA graph may be replayed with
    others. Kernels read no page and no row outside, whatever they say: a length beyond the table counts as its end, and
    a page that is none as the last one. On the CPU both are refused. What a table has behind a sequence's keys is never
    read. Long keys of few rows are cut into parts, as the lengths of all sequences suggest; with num_splits=1 they are
    not, and the bits of a row depend on nothing else in the batch.

    Raises UnsupportedProblemError for tensors that do not go together, and where a gradient is wanted.
    """
    (q,), (k, v) = validate.tensors(PACKED, q=q), validate.tensors(k=k, v=v)
    gradients.refuse(q, k, v)
    starts = sequences.validate_starts("cu_seqlens_q", _as_int32(cu_seqlens_q), q.device)
    batch, room_q = starts.shape[0] - 1, validate.rows("max_seqlen_q", max_seqlen_q)
    table = validate.tensor("block_table", _as_int32(block_table))
    fp8 = FP8 if k.dtype == FP8 else None
    cache = caches.cache_of(q.new_empty((batch, 1, 1, 1)), k, v, table, None, fp8, any_columns_of_v=True)
    cache = caches.scaled(cache, k_descale, v_descale)
    room = caches.room_of(cache)
    if validate.surely((longest := validate.rows("max_seqlen_k", max_seqlen_k)) > room):
        raise UnsupportedProblemError(f"max_seqlen_k={longest}: block_table has room for {room} keys a sequence")
    lengths = _lengths(cu_seqlens_k, seqused_k, cache, longest)
    if can_look_at(starts):
        sequences.validate_bounds("q", starts, q.shape[0], room_q)
        caches.check_pages(cache, lengths, least=0)
    is_causal, (left, right) = validate.mask(causal, window_size, room)
    into = None if out is None else _room_for(out, (*q.shape[:2], v.shape[3]), q)
    order: torch.Tensor | None = None
    if seqused_q is not None:
        used = caches.numbers("seqused_q", _as_int32(seqused_q), batch, q.device, room_q, "max_seqlen_q allows")
        if batch:
            order, starts = sequences.used_first(starts, used, q.shape[0])
    rows = Rows(
        (q if order is None else q[order])[None],
        cache.k,
        cache.v,
        starts,
        lengths,
        table,
        None if alibi_slopes is None else validate.slopes(alibi_slopes, q.device, batch, q.shape[1]),
        None if sinks is None else validate.sinks(sinks, q.device, q.shape[1], "s_aux"),
        cache.k_descale,
        cache.v_descale,
        is_causal,
        validate.scale(softmax_scale),
        left,
        None if is_causal else right,
        validate.softcap(softcap),
        _splits(num_splits),
    )
    if order is None:
        o, lse = _attend(rows, into)
    else:
        o, lse = _in_their_places(order, *_attend(rows, None), into)
    return o[0], lse[0]


def _in_their_places(order: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, out: torch.Tensor | None) -> _Outputs:
    """What was computed of rows in this order."""
    placed = torch.empty_like(o) if out is None else out
    return placed.index_copy_(1, order, o), torch.empty_like(lse).index_copy_(2, order, lse)


def _as_int32(value: Any) -> Any:
    """Numbers as kernels read them, by a kernel before them where they are int64."""
    return value.int() if isinstance(value, torch.Tensor) and value.dtype == torch.int64 else value


def _splits(num_splits: int) -> int:
    if validate.surely((found := validate.whole("num_splits", num_splits)) not in (0, 1)):
        raise UnsupportedProblemError(
            f"num_splits={found} with a block_table: 1 cuts no keys, and 0 as many as the lengths suggest, on the GPU"
        )
    return found


def _lengths(
    cu_seqlens_k: torch.Tensor | None, seqused_k: torch.Tensor | None, cache: Cache, longest: int
) -> torch.Tensor:
    """How many keys each sequence has: (batch), int32."""
    if seqused_k is not None:
        return caches.numbers_of("seqused_k", _as_int32(seqused_k), cache)
    if cu_seqlens_k is None:
        raise UnsupportedProblemError("neither seqused_k nor cu_seqlens_k is given: how many keys has a sequence")
    starts = sequences.validate_starts("cu_seqlens_k", _as_int32(cu_seqlens_k), cache.k.device)
    assert cache.table is not None
    count, batch = starts.shape[0] - 1, cache.table.shape[0]
    if validate.surely(count != batch):
        raise UnsupportedProblemError(f"cu_seqlens_q is of {batch} sequences, cu_seqlens_k of {count}")
    if can_look_at(starts):
        sequences.validate_bounds("k", starts, batch * longest, longest)
    return starts.diff()


def _room_for(out: torch.Tensor, shape: tuple[int, ...], q: torch.Tensor) -> torch.Tensor:
    """`out` as of a batch of one; UnsupportedProblemError where it has no room for O, of this shape."""
    found = validate.like(
        "out", out, lambda of_out: not validate.differ(of_out, shape), q.dtype, q.device, f"O is {shape}"
    )
    return found[None]


@dataclass
class Rows(Flat):
    """A call, as kernels take it: q is of a batch of one, numbers are int32, slopes (batch, heads), sinks (heads,)."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cache_seqlens: torch.Tensor
    block_table: torch.Tensor
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None
    causal: bool = False
    softmax_scale: float | None = None
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    num_splits: int = 0

    @property
    def problem(self) -> Problem:
        """UnsupportedProblemError where it is none."""
        num_pages, page_size = self.k_cache.shape[:2]
        batch, max_pages = self.block_table.shape
        pages = {"packed_q": True, "paged": True, "page_size": max(1, page_size), "num_pages": num_pages}
        options = {**pages, "num_splits": self.num_splits, **scales_of(self.k_descale)}
        return problem_of(
            self.q,
            self.k_cache,
            operation="decode",
            batch=batch,
            seqlen_k=max_pages * page_size,
            head_dim_v=self.v_cache.shape[3],
            causal=self.causal,
            softmax_scale=self.softmax_scale,
            window_left=self.window_left,
            window_right=self.window_right,
            softcap=self.softcap,
            alibi=self.alibi_slopes is not None,
            sinks=self.sinks is not None,
            lse=True,
            options=tuple(options.items()),
        )


def _attend(rows: Rows, out: torch.Tensor | None) -> _Outputs:
    if not operator.are_observed(rows.q, rows.k_cache, rows.v_cache):
        return _compute(rows, out)
    if out is None:
        o, lse = attend_pages(*rows.flat())
        return o, lse
    return out, attend_pages_out(out, *rows.flat())


def _compute(rows: Rows, out: torch.Tensor | None) -> _Outputs:
    problem = rows.problem
    outputs = new_outputs(problem, rows.q, out)
    tensors = {name: getattr(rows, name) for name in problem.inputs}
    operator.launch(problem, tensors | outputs, out_is_given=out is not None)
    return outputs["o"], outputs[LSE]


@torch.library.custom_op("flashladder::attend_pages", mutates_args=(), schema=f"({Rows.schema()}) -> (Tensor, Tensor)")
def attend_pages(*values: Any) -> _Outputs:
    """As programs that torch compiles call it."""
    return _compute(Rows(*values), None)


@torch.library.custom_op(
    "flashladder::attend_pages_out", mutates_args=("out",), schema=f"(Tensor(a!) out, {Rows.schema()}) -> Tensor"
)
def attend_pages_out(out: torch.Tensor, *values: Any) -> torch.Tensor:
    """The same into `out`; it gives the log-sum-exp."""
    return _compute(Rows(*values), out)[1]


@attend_pages.register_fake
def _(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *_: Any) -> _Outputs:
    return new_o(q, v_cache.shape[3]), new_lse(q)


@attend_pages_out.register_fake
def _(out: torch.Tensor, q: torch.Tensor, *_: Any) -> torch.Tensor:
    return new_lse(q)


@flops.formula("attend_pages")
def _(*values: Any) -> int:
    return _flops(Rows(*values))


@flops.formula("attend_pages_out")
def _(out: torch.Tensor, *values: Any) -> int:
    return _flops(Rows(*values))


def _flops(rows: Rows) -> int:
    """Of which each row meets each key of its sequence."""
    room = rows.block_table.shape[1] * rows.k_cache.shape[1]
    keys, of_q = flops.lengths(rows.cache_seqlens, room), flops.lengths(rows.cu_seqlens_q.diff(), rows.q.shape[1])
    columns = rows.q.shape[3] + rows.v_cache.shape[3]
    return 2 * rows.q.shape[2] * columns * sum(a * b for a, b in zip(of_q, keys, strict=True))
