"""Partial results of attention into one: what shared prefixes, cascades and rings are made of."""

from __future__ import annotations

import math

import torch

from flashladder.common.api import gradients, validate
from flashladder.common.errors import UnsupportedProblemError


def merge_states(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor | None = None, lse_b: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What attention over the keys of both sides gives, from what it gave over each: (o, lse). No key is in both.

    With two arguments, as FlashInfer's function of this name: o_a is (tokens, parts, heads, head_dim), lse_a (tokens,
    parts, heads), and all parts of a token become one, (tokens, heads, head_dim) and (tokens, heads). FlashInfer's lse
    is in binary logarithms: multiply it by ln 2.

    Both o are (batch, seqlen_q, heads, head_dim), both lse (batch, heads, seqlen_q), fp32, in natural logarithms, as
    `attention(..., return_lse=True)` returns them; o and lse come back likewise, o in the dtype of o_a: with an o_a of
    fp32 a sum of many parts is rounded once. Without the batch they are packed sequences.

    It computes in fp32: lse = log(exp(lse_a) + exp(lse_b)), and o is the sum of both, weighted with exp(lse_a - lse)
    and exp(lse_b - lse), which are sigmoid(lse_a - lse_b) and sigmoid(lse_b - lse_a). FlashInfer calls it a merge of
    states (arXiv:2501.01005). These are torch's operators, of which torch.compile makes fewer kernels.

    Where a side sees no key its lse is -inf, or +inf as in flash-attn, and what its o holds there is not read. Where
    none sees one, o = 0 and lse = -inf. Forward only; works under torch.compile.

    Raises UnsupportedProblemError for tensors that do not belong together, or that want a gradient.
    """
    o_a, lse_a = validate.tensors(o_a=o_a, lse_a=lse_a)
    if o_b is None and lse_b is None:
        _check_parts(o_a, lse_a)
        gradients.refuse(o_a, lse_a, what="the partial outputs", whose="merge_states computes")
        return _merge_parts(o_a, lse_a)
    o_b, lse_b = validate.tensors(o_b=o_b, lse_b=lse_b)
    tensors = {"o_a": o_a, "lse_a": lse_a, "o_b": o_b, "lse_b": lse_b}
    for name, o, lse in (("a", o_a, lse_a), ("b", o_b, lse_b)):
        _check(name, o, lse)
    if o_a.shape != o_b.shape:
        raise UnsupportedProblemError(f"o_b is {tuple(o_b.shape)}; with o_a it is {tuple(o_a.shape)}")
    if len({tensor.device for tensor in tensors.values()}) > 1:
        there = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise UnsupportedProblemError(f"{there}; they should be on one device")
    gradients.refuse(*tensors.values(), what="the partial outputs", whose="merge_states computes")
    return _merge(o_a, lse_a, o_b, lse_b)


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


@torch.library.custom_op("flashladder::merge_parts", mutates_args=())
def _merge_parts(o: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lse = lse.masked_fill(lse == math.inf, -math.inf)
    weights = torch.softmax(lse, 1).unsqueeze(-1)
    parts = (o.float() * weights).masked_fill((lse == -math.inf).unsqueeze(-1), 0)
    return parts.sum(1).to(o.dtype), torch.logsumexp(lse, 1)


@_merge_parts.register_fake
def _(o: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, _, heads, head_dim = o.shape
    return o.new_empty((tokens, heads, head_dim)), lse.new_empty((tokens, heads))


def _check(side: str, o: torch.Tensor, lse: torch.Tensor) -> None:
    if o.dim() not in (3, 4) or not o.is_floating_point():
        raise UnsupportedProblemError(
            f"o_{side} is {tuple(o.shape)} {o.dtype}; it should be (batch, seqlen_q, heads, head_dim) of floating point"
        )
    rows = (*o.shape[:-3], o.shape[-2], o.shape[-3])
    if tuple(lse.shape) != rows or lse.dtype != torch.float32:
        raise UnsupportedProblemError(
            f"lse_{side} is {tuple(lse.shape)} {lse.dtype}; with o_{side} of {tuple(o.shape)} it is {rows} "
            "torch.float32: (batch, heads, seqlen_q)"
        )


@torch.library.custom_op("flashladder::merge_states", mutates_args=())
def _merge(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    lse_a, lse_b = (lse.masked_fill(lse == math.inf, -math.inf) for lse in (lse_a, lse_b))
    o = _weighted(o_a, lse_a, lse_b).add_(_weighted(o_b, lse_b, lse_a))
    return o.to(o_a.dtype, memory_format=torch.contiguous_format), torch.logaddexp(lse_a, lse_b).contiguous()


@_merge.register_fake
def _(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return o_a.new_empty(o_a.shape), lse_a.new_empty(lse_a.shape)


def _weighted(o: torch.Tensor, own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A side's part of the sum, in fp32; 0 where it sees no key, whatever it holds there."""
    weights = torch.sigmoid(own - other)  # of the difference, which is exact where both are large and near each other
    return (o.float() * _by_row(weights)).masked_fill(_by_row(own == -math.inf), 0)


def _by_row(tensor: torch.Tensor) -> torch.Tensor:
    """(batch, heads, seqlen_q) laid beside (batch, seqlen_q, heads, head_dim)."""
    return tensor.transpose(-1, -2).unsqueeze(-1)
