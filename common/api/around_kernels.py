"""What no kernel does, so that columns of zeros are added before it, in copies of the tensors.

Of a head_dim that is no multiple of 8 no copy of 16 bytes could follow the rows: flash-attn's functions fill it up too.
No kernel has a head_dim_v that is larger than the head_dim; none of the backward pass or with dropout has another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.head_dims import HEAD_DIM_STEP


def are_needed(q: torch.Tensor, v: torch.Tensor, alike: bool) -> bool:
    """Whether a call on q and v, whose last dimensions are head_dim and head_dim_v, needs columns of zeros.

    `alike` says whether both have to be one.
    """
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    is_odd = head_dim % HEAD_DIM_STEP or head_dim_v % HEAD_DIM_STEP
    return bool(is_odd or head_dim_v > head_dim or (alike and head_dim_v != head_dim))


def attend(
    call: Callable[..., Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O, (..., seqlen_q, num_heads, head_dim_v), and the log-sum-exp, (..., num_heads, seqlen_q).

    `call(q, k, v, softmax_scale=...)` gives both for tensors of one head_dim that is a multiple of 8.
    UnsupportedProblemError for a k that is not as wide as q.
    """
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    if k.shape[-1] != head_dim:
        shapes = ", ".join(f"{name} is {tuple(x.shape)}" for name, x in zip("qkv", (q, k, v), strict=True))
        raise UnsupportedProblemError(f"{shapes}; kernels take one head_dim, the last dimension, of q and k")
    columns = -(-max(head_dim, head_dim_v) // HEAD_DIM_STEP) * HEAD_DIM_STEP
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    o, lse = call(*(pad(x, (0, columns - x.shape[-1])) for x in (q, k, v)), softmax_scale=scale)
    return o[..., :head_dim_v], lse
