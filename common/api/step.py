"""A step of decode: rows of Q against a cache, as kernels take it, in operators of torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import pad

from flashladder.common.api import caches, flops, operator, validate
from flashladder.common.api.caches import Cache
from flashladder.common.api.options import Flat, problem_of
from flashladder.common.problem.fp8 import FP8
from flashladder.common.problem.head_dims import CACHED_HEAD_DIMS
from flashladder.common.problem.problem import LSE, Problem
from flashladder.common.problem.rotary import Rotary
from flashladder.common.runtime import ready
from flashladder.common.runtime.outputs import new_lse, new_o, new_outputs, shape_of_lse


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
    sinks: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None
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
            "tree_mask": self.tree_mask,
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks,
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
        options["tree"] = self.tree_mask is not None
        options |= caches.scales_of(self.k_descale)
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
            sinks=self.sinks is not None,
            lse=True,
            options=tuple(options.items()),
        )


_FIELDS = tuple(field.name for field in dataclasses.fields(Step))
Outputs = tuple[torch.Tensor, torch.Tensor]


def written(k: torch.Tensor, v: torch.Tensor, rotary: Rotary | None) -> dict[str, Any]:
    """What a step has that writes new keys, by name."""
    tables = {} if rotary is None else {f"rotary_{name}": value for name, value in rotary._asdict().items()}
    return {"k": k, "v": v, **tables}


@dataclass
class Call:
    """How a step is asked for: the memory for O if that is given, what turns q and new keys, and what the plan of such
    calls is found by: the options as they were given, and as they were validated."""

    out: torch.Tensor | None
    return_lse: bool
    rotary: Rotary | None
    options: tuple[tuple[Any, ...], tuple[Any, ...]]


def computed(call: Call, *values: Any, **named: Any) -> torch.Tensor | Outputs:
    """What a call gives, whose step has these values: O, or O and the log-sum-exp."""
    step, out = Step(*values, **named), call.out
    if call.rotary and step.k is None:
        step = turned(step, call.rotary)
    if cpp := operator.in_cpp():
        tensors = tuple(step.tensors.values())
        if out is None:
            done = cpp.remembered(operator.onlookers, planned, tensors, call.options[1], call.return_lse)
        else:
            done = launch_into(out, cpp, tensors, call.options[1], call.return_lse)
        if done is not None:
            return done
    head_dim, is_wide = step.q.shape[3], step.q.shape[3] > CACHED_HEAD_DIMS[-1]  # which is refused later
    if head_dim in CACHED_HEAD_DIMS or is_wide or step.k_cache.shape[3] != head_dim:
        o, lse = attend(step, out)
        if ready.is_gpu(o.device) and o.numel() and step.k_cache.numel() and not operator.is_observed():
            remember(step, out, *call.options)
    else:
        o, lse = attend_padded(step, out)
    return (o, lse) if call.return_lse else o


def attend(step: Step, out: torch.Tensor | None) -> Outputs:
    """O, which is `out` if that is given, and the log-sum-exp."""
    flops.tell()
    batch, rows, heads, head_dim = step.q.shape
    if step.k is not None and validate.surely(rows == 0) and heads:  # new keys are written beside a row of nobody
        attend(dataclasses.replace(step, q=step.q.new_zeros((batch, 1, heads, head_dim))), None)
        return new_o(step.q) if out is None else out, new_lse(step.q)
    values = [getattr(step, name) for name in _FIELDS]  # as torch 2.11 compiles it, which does not trace vars()
    if out is not None:
        return out, (decode_out if step.k is None else append_and_decode_out)(*values, out)
    o, lse = (decode if step.k is None else append_and_decode)(*values)
    return o, lse


def attend_padded(step: Step, out: torch.Tensor | None) -> Outputs:
    """The same of a head_dim that no kernel has, by copies with zeros behind their columns."""
    head_dim, cache, new = step.q.shape[3], step.cache, step.k
    columns = next(columns for columns in CACHED_HEAD_DIMS if head_dim <= columns)
    narrow = {"q": step.q, "k_cache": step.k_cache, "v_cache": step.v_cache, "k": step.k, "v": step.v}
    wide = {name: None if x is None else _widened(x, columns) for name, x in narrow.items()}
    scale = head_dim**-0.5 if step.softmax_scale is None else step.softmax_scale
    if new is not None:
        caches.check_apart(cache, step.tensors)
    padded = dataclasses.replace(step, softmax_scale=scale, **wide)  # type: ignore[arg-type]
    o, lse = attend(padded, None)
    if new is not None:
        where, _ = caches.new_places(cache, step.cache_seqlens, new.shape[1])  # to another key's comes what is there
        for into, written in ((cache.k, padded.k_cache), (cache.v, padded.v_cache)):
            _bytes(into).index_put_(where, _bytes(written)[where][..., :head_dim])
    return o[..., :head_dim] if out is None else out.copy_(o[..., :head_dim]), lse


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """8-bit floats as bytes: torch has few operators of them."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


def _widened(x: torch.Tensor, columns: int) -> torch.Tensor:
    return pad(_bytes(x), (0, columns - x.shape[-1])).view(x.dtype)


def turned(step: Step, rotary: Rotary) -> Step:
    """The step whose q is turned, where there are no new keys, which kernels turn it with."""
    in_order = step.causal or (step.window_left, step.window_right) != validate.OPEN
    positions = caches.places(step.cache_seqlens, step.q.shape[1] if in_order else 1, caches.room_of(step.cache))
    return dataclasses.replace(step, q=rotary.turned(step.q, positions.expand(-1, step.q.shape[1])))


def _compute(step: Step, out: torch.Tensor | None = None) -> Outputs:
    problem = step.problem
    if step.k is not None:
        caches.check_apart(step.cache, step.tensors)
    outputs = new_outputs(problem, step.q, out)
    operator.launch(problem, step.tensors | outputs, out_is_given=out is not None)
    return outputs["o"], outputs[LSE]


def _decode(*values: Any) -> Outputs:
    return _compute(Step(*values))


def _decode_out(*values: Any) -> torch.Tensor:
    *fields, out = values
    return _compute(Step(*fields), out)[1]


_CACHES = {"k_cache": "Tensor(a!)", "v_cache": "Tensor(b!)"}
decode, append_and_decode = (
    torch.library.custom_op(
        f"flashladder::{name}", _decode, mutates_args=written, schema=f"({Step.schema(**written)}) -> (Tensor, Tensor)"
    )
    for name, written in (("decode", {}), ("append_and_decode", _CACHES))
)
decode_out, append_and_decode_out = (
    torch.library.custom_op(
        f"flashladder::{name}",
        _decode_out,
        mutates_args=(*written, "out"),
        schema=f"({Step.schema(**written)}, Tensor(c!) out) -> Tensor",
    )
    for name, written in (("decode_out", {}), ("append_and_decode_out", _CACHES))
)


@decode.register_fake
@append_and_decode.register_fake
def _(q: torch.Tensor, *_: Any) -> Outputs:
    return new_o(q), new_lse(q)


@decode_out.register_fake
@append_and_decode_out.register_fake
def _(q: torch.Tensor, *_: Any) -> torch.Tensor:
    return new_lse(q)


@flops.formula("decode", "append_and_decode", "decode_out", "append_and_decode_out")
def _(*values: Any) -> int:
    step = Step(*values[: len(dataclasses.fields(Step))])
    new = 0 if step.k is None else step.k.shape[1]
    lengths = flops.lengths(step.cache_seqlens, caches.room_of(step.cache))
    keys = sum(min(length + new, caches.room_of(step.cache)) for length in lengths)
    return 2 * keys * step.q.shape[1] * step.q.shape[2] * 2 * step.q.shape[3]


# The plans of problems that came often, as fast_path.cpp finds them, each with the shape of the log-sum-exp.
planned: dict[bytes, tuple[Any, ...]] = {}


def remember(step: Step, out: torch.Tensor | None, *asked: tuple[Any, ...]) -> None:
    """That tensors like these and any of what is `asked` for are this problem."""
    problem = step.problem
    call = ready.ready_for(problem, step.q.device).call
    tensors = (*step.tensors.values(), *(() if out is None else (out,)))
    operator.remember(planned, call, problem, tensors, *asked, kept=(shape_of_lse(step.q),))


def launch_into(
    out: torch.Tensor, cpp: ModuleType, tensors: tuple[Any, ...], asked: tuple[Any, ...], return_lse: bool
) -> Any:
    """What a call gives whose O is `out`, if C++ launches it, as one like it came before; else None."""
    lse = new_lse(validate.tensors(validate.BATCH, q=tensors[0])[0])
    if not cpp.launched(operator.onlookers, planned, (*tensors, out), asked, (lse,)):
        return None
    return (out, lse) if return_lse else out
