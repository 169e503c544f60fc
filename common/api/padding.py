"""What no kernel does, so that columns of zeros are added before it, in copies of the tensors.

Of a head_dim that is no multiple of 8 no copy of 16 bytes could follow the rows: flash-attn's functions fill it up too.
No kernel has a head_dim_v that is larger than the head_dim; few of the backward pass or with dropout have another one.
Rung 11 of the backward ladder, which runs everywhere, has kernels of few head_dims.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.nn.functional import pad

from flashladder.common.api.options import Options
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.head_dims import HEAD_DIM_STEP, HEAD_DIMS, TRAINED_HEAD_DIMS


def is_needed(head_dim: int, head_dim_v: int, dropout: bool, trains: bool) -> bool:
    """Whether a call on q and k of head_dim columns, and v of head_dim_v, needs columns of zeros.

    `dropout` and `trains` say whether weights are dropped, and whether a gradient is wanted.
    """
    is_alike = head_dim_v == head_dim or not (dropout or trains)
    return columns(head_dim, head_dim_v, trains) != head_dim or head_dim_v % HEAD_DIM_STEP != 0 or not is_alike


def padded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, trains: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Options]:
    """The same call on tensors of one head_dim that is a multiple of 8, and has gradients if it `trains`.

    The first head_dim_v columns of its O are O.
    """
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    if (wanted := columns(head_dim, head_dim_v, trains)) > HEAD_DIMS[-1]:
        raise UnsupportedProblemError(f"q has head_dim {head_dim}, v {head_dim_v}; kernels take up to {HEAD_DIMS[-1]}")
    q, k, v = (pad(x, (0, wanted - x.shape[-1])) for x in (q, k, v))
    if options.softmax_scale is None:
        options = dataclasses.replace(options, softmax_scale=head_dim**-0.5)
    return q, k, v, options


def columns(head_dim: int, head_dim_v: int, trains: bool) -> int:
    """That copies have; more than kernels have where no kernel has so many, which is refused later."""
    least = -(-max(head_dim, head_dim_v) // HEAD_DIM_STEP) * HEAD_DIM_STEP
    return next((head_dim for head_dim in TRAINED_HEAD_DIMS if trains and least <= head_dim), least)
