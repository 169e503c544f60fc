"""What no kernel does, so that it is done before and behind one: an odd head_dim, and attention sinks.

Of a head_dim that is no multiple of 8 no copy of 16 bytes could follow the rows. Columns of zeros fill it up, in copies
of the tensors, as in flash-attn's functions.

A sink, as gpt-oss has it, is one more logit a head in each row's sum, which has no value. With the logit s, exp(s)
joins the denominator. So O is what it is without, times exp(lse) / (exp(lse) + exp(s)), and the log-sum-exp is
log(exp(lse) + exp(s)). Both are worked out in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

from flashladder.common.api import differentiable, given, gradients
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.head_dims import HEAD_DIM_STEP

_SINK_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def are_needed(q: torch.Tensor, sinks: torch.Tensor | None) -> bool:
    """Whether a call on q, whose last dimension is head_dim, needs anything of this file."""
    return sinks is not None or q.shape[-1] % HEAD_DIM_STEP != 0


def attend(
    call: Callable[..., Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    softmax_scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O, (..., seqlen_q, num_heads, head_dim), and the log-sum-exp, (..., num_heads, seqlen_q).

    `call(q, k, v, softmax_scale=...)` gives both for a head_dim that is a multiple of 8, without sinks.
    UnsupportedProblemError for head_dims that differ, what are no sinks of q, and gradients with sinks.
    """
    head_dim = q.shape[-1]
    logits = None if sinks is None else _logits(sinks, q, k, v)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    o, lse = call(*(_filled_up(q, k, v) if head_dim % HEAD_DIM_STEP else (q, k, v)), softmax_scale=scale)
    o = o[..., :head_dim]
    return (o, lse) if logits is None else _with_sinks(o, lse, logits)


def _filled_up(*qkv: torch.Tensor) -> list[torch.Tensor]:
    """All three to the next multiple of 8."""
    if len({tuple(x.shape[-1:]) for x in qkv}) > 1:
        shapes = ", ".join(f"{name} is {tuple(x.shape)}" for name, x in zip("qkv", qkv, strict=True))
        raise UnsupportedProblemError(f"{shapes}; kernels take one head_dim, the last dimension, of all three")
    return [pad(x, (0, -x.shape[-1] % HEAD_DIM_STEP)) for x in qkv]


def _logits(sinks: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Sinks in fp32."""
    given.tensors(sinks=sinks)
    heads, shape = q.shape[-2], tuple(sinks.shape)
    if shape != (heads,) or sinks.dtype not in _SINK_DTYPES:
        raise UnsupportedProblemError(
            f"sinks is {shape} {sinks.dtype}; with q it is ({heads},) torch.float32, torch.bfloat16 or torch.float16"
        )
    if sinks.device != q.device:
        raise UnsupportedProblemError(f"sinks on {sinks.device}, q on {q.device}; kernels take one device")
    gradients.refuse(sinks, what="sinks")
    if gradients.wanted(q, k, v):
        differentiable.refuse(sinks=True)
    return sinks.float()


def _with_sinks(o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A row without keys keeps O = 0, and its log-sum-exp is the sink."""
    sink = sinks[:, None]
    share = torch.sigmoid(lse - sink).masked_fill(lse == -torch.inf, 0)  # of the keys; -inf less -inf would be NaN
    return (o * share.transpose(-1, -2)[..., None]).to(o.dtype), torch.logaddexp(lse, sink)
