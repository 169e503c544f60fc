"""Partial results of attention into one: what shared prefixes, cascades and rings are made of."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashladder.common.api import gradients, operator, validate
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.problem import DTYPES, Problem
from flashladder.common.runtime import ready

_NARROW = {dtype: name for name, dtype in DTYPES.items()}


def merge_states(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor | None = None,
    lse_b: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    rows_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What attention over the keys of both sides gives, from what it gave over each: (o, lse). No key is in both.

    With two arguments, as FlashInfer's function of this name: o_a is (tokens, parts, heads, head_dim), lse_a (tokens,
    parts, heads), and all parts of a token become one, (tokens, heads, head_dim) and (tokens, heads). FlashInfer's lse
    is in binary logarithms: multiply it by ln 2.

    Both o are (batch, seqlen_q, heads, head_dim), both lse (batch, heads, seqlen_q), fp32, in natural logarithms, as
    `attention(..., return_lse=True)` returns them; o and lse come back likewise, o in the dtype of o_a: with an o_a of
    fp32 a sum of many parts is rounded once. Without the batch they are packed sequences. With `rows_first` both lse,
    and the one that comes back, are (batch, seqlen_q, heads), as FlashInfer's. O is written to `out` if that is given,
    memory like O, which may be o_a itself.

    It computes in fp32: lse = log(exp(lse_a) + exp(lse_b)), and o is the sum of both, weighted with exp(lse_a - lse)
    and exp(lse_b - lse). FlashInfer calls it a merge of states (arXiv:2501.01005). On a GPU that is one kernel, where
    both o are of one 16-bit type, or o_a is fp32 and o_b is not, and head_dim is 64, 80, 96, 128, 192, 256 or 512.
    Else, and on the CPU, these are torch's operators. After a first call a CUDA graph may capture it.

    Where a side sees no key its lse is -inf, or +inf as in flash-attn, and what its o holds there is not read. Where
    none sees one, o = 0 and lse = -inf. Forward only; works under torch.compile.

    Raises UnsupportedProblemError for tensors that do not belong together, or that want a gradient.
    """
    o_a, lse_a = validate.tensors(o_a=o_a, lse_a=lse_a)
    rows_first = validate.flag("rows_first", rows_first)
    tensors = {"o_a": o_a, "lse_a": lse_a}
    if o_b is None and lse_b is None:
        _check_parts(o_a, lse_a)
        result = (o_a.shape[0], *o_a.shape[2:])
    else:
        o_b, lse_b = validate.tensors(o_b=o_b, lse_b=lse_b)
        tensors |= {"o_b": o_b, "lse_b": lse_b}
        for name, o, lse in (("a", o_a, lse_a), ("b", o_b, lse_b)):
            _check(name, o, lse, rows_first)
        if o_a.shape != o_b.shape:
            raise UnsupportedProblemError(f"o_b is {tuple(o_b.shape)}; with o_a it is {tuple(o_a.shape)}")
        if len({tensor.device for tensor in tensors.values()}) > 1:
            there = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
            raise UnsupportedProblemError(f"{there}; they should be on one device")
        result = tuple(o_a.shape)
    gradients.refuse(*tensors.values(), what="the partial outputs", whose="merge_states computes")
    if out is None:
        return _merge(o_a, lse_a, o_b, lse_b, rows_first)
    validate.like("out", out, lambda shape: not validate.differ(shape, result), o_a.dtype, o_a.device, f"O is {result}")
    return out, _merge_out(o_a, lse_a, o_b, lse_b, rows_first, out)


def _check_parts(o: torch.Tensor, lse: torch.Tensor) -> None:
    if o.dim() != 4 or not o.is_floating_point():
        raise UnsupportedProblemError(
            f"o_a is {tuple(o.shape)} {o.dtype}; without o_b it should be (tokens, parts, heads, head_dim) of floating "
            "point"
        )
    if (lse.shape, lse.dtype, lse.device) != (o.shape[:3], torch.float32, o.device):
        raise UnsupportedProblemError(
            f"lse_a is {tuple(lse.shape)} {lse.dtype} on {lse.device}; with o_a alone it is {tuple(o.shape[:3])} "
            f"torch.float32 on {o.device}: (tokens, parts, heads)"
        )


def _check(side: str, o: torch.Tensor, lse: torch.Tensor, rows_first: bool) -> None:
    if o.dim() not in (3, 4) or not o.is_floating_point():
        raise UnsupportedProblemError(
            f"o_{side} is {tuple(o.shape)} {o.dtype}; it should be (batch, seqlen_q, heads, head_dim) of floating point"
        )
    rows, layout = tuple(o.shape[:-1]), "(batch, seqlen_q, heads)"
    if not rows_first:
        rows, layout = (*o.shape[:-3], o.shape[-2], o.shape[-3]), "(batch, heads, seqlen_q)"
    if tuple(lse.shape) != rows or lse.dtype != torch.float32:
        raise UnsupportedProblemError(
            f"lse_{side} is {tuple(lse.shape)} {lse.dtype}; with o_{side} of {tuple(o.shape)} it is {rows} "
            f"torch.float32: {layout}"
        )


_States = tuple[torch.Tensor, torch.Tensor]


@torch.library.custom_op("flashladder::merge_states", mutates_args=())
def _merge(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor | None, lse_b: torch.Tensor | None, rows_first: bool
) -> _States:
    o, lse = _new(o_a, lse_a, o_b)
    _compute(o_a, lse_a, o_b, lse_b, rows_first, o, lse)
    return o, lse


@torch.library.custom_op("flashladder::merge_states_out", mutates_args=("out",))
def _merge_out(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor | None,
    lse_b: torch.Tensor | None,
    rows_first: bool,
    out: torch.Tensor,
) -> torch.Tensor:
    _, lse = _new(o_a, lse_a, o_b)
    _compute(o_a, lse_a, o_b, lse_b, rows_first, out, lse)
    return lse


@_merge.register_fake
def _(o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor | None, *_: Any) -> _States:
    return _new(o_a, lse_a, o_b)


@_merge_out.register_fake
def _(o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor | None, *_: Any) -> torch.Tensor:
    return _new(o_a, lse_a, o_b)[1]


def _new(o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor | None) -> _States:
    """Memory for what comes out: of parts, that of their tokens."""
    shapes = tuple(o_a.shape), tuple(lse_a.shape)
    if o_b is None:
        shapes = (o_a.shape[0], *o_a.shape[2:]), (lse_a.shape[0], lse_a.shape[2])
    return o_a.new_empty(shapes[0]), lse_a.new_empty(shapes[1])


def _compute(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor | None,
    lse_b: torch.Tensor | None,
    rows_first: bool,
    o: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """By the kernel, where there is one for such tensors; else by torch's operators. It fills o and lse."""
    if o_a.is_cuda and o_a.numel() and _launch(o_a, lse_a, o_b, lse_b, rows_first, o, lse):
        return
    if o_b is None or lse_b is None:
        states, sums = o_a, lse_a
    else:
        sums = torch.stack([x if rows_first else x.transpose(-1, -2) for x in (lse_a, lse_b)], -2)
        states = torch.stack((o_a.float(), o_b.float()), -3)
    sums = sums.masked_fill(sums == math.inf, -math.inf)
    weighted = states.float() * torch.softmax(sums, -2).unsqueeze(-1)
    o.copy_(weighted.masked_fill_((sums == -math.inf).unsqueeze(-1), 0).sum(-3))
    found = torch.logsumexp(sums, -2)
    lse.copy_(found if rows_first or o_b is None else found.transpose(-1, -2))


def _launch(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor | None,
    lse_b: torch.Tensor | None,
    rows_first: bool,
    o: torch.Tensor,
    lse: torch.Tensor,
) -> bool:
    """Whether a kernel takes tensors of these types and this head_dim; it fills o and lse then."""
    is_stacked, dtype = o_b is None, o_a.dtype if o_b is None else o_b.dtype
    if o_a.dtype not in (dtype, torch.float32) or dtype not in (*_NARROW, *([torch.float32] if is_stacked else [])):
        return False
    options: dict[str, Any] = {"wide": o_a.dtype == torch.float32, "stacked": is_stacked}
    options |= {"a_rows_first": int(rows_first or is_stacked), "b_rows_first": int(rows_first)}
    if o_b is None:
        o, lse = o[:, None], lse[:, None]
    given = {"o_a": o_a, "o_b": o_b, "o": o, "lse_a": lse_a, "lse_b": lse_b, "lse": lse}
    if o_a.dim() == 3:
        given = {name: None if x is None else x[None] for name, x in given.items()}
    batch, rows, heads, head_dim = given["o_a"].shape  # type: ignore[union-attr]
    sizes: dict[str, Any] = {"batch": batch, "seqlen_q": rows, "num_heads": heads, "head_dim": head_dim}
    problem = Problem(operation="merge", dtype=_NARROW.get(dtype, "bf16"), **sizes, options=tuple(options.items()))
    try:
        ready.choice_for(problem, o_a.device)
    except UnsupportedProblemError:
        return False
    operator.launch(problem, given)
    return True
