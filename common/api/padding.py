"""What no kernel does, so that columns of zeros are added before it, in copies of the tensors.

Of a head_dim that is no multiple of 8 no copy of 16 bytes could follow the rows: flash-attn's functions fill it up too.
No kernel has a head_dim_v that is larger than the head_dim, none with dropout another one. What has gradients as it is,
the catalogue says of each card.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.nn.functional import pad

from flashladder.common.api.options import Options
from flashladder.common.catalog import Widths
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.head_dims import HEAD_DIM_STEP, HEAD_DIMS


def columns(head_dim: int, head_dim_v: int, dropout: bool, trained: Widths | None) -> tuple[int, int]:
    """Those that kernels are called with for q and k of head_dim columns and v of head_dim_v.

    `dropout` says whether weights are dropped; `trained` has what gradients take, where one is wanted. They are more
    than kernels have where no kernel has so many, which is refused later.
    """
    least, least_v = (-(-each // HEAD_DIM_STEP) * HEAD_DIM_STEP for each in (head_dim, head_dim_v))
    if least_v > least or dropout or (trained and not trained.narrower_v):
        least = least_v = max(least, least_v)
    if trained and least not in trained.head_dims:
        least = least_v = next((each for each in trained.head_dims if least <= each), least)
    return least, least_v


def padded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, wanted: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Options]:
    """The same call on tensors with the `columns` that are wanted; the first head_dim_v columns of its O are O."""
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    if wanted[0] > HEAD_DIMS[-1]:
        raise UnsupportedProblemError(f"q has head_dim {head_dim}, v {head_dim_v}; kernels take up to {HEAD_DIMS[-1]}")
    q, k, v = (filled(x, each) for x, each in ((q, wanted[0]), (k, wanted[0]), (v, wanted[1])))
    if options.softmax_scale is None:
        options = dataclasses.replace(options, softmax_scale=head_dim**-0.5)
    return q, k, v, options


def filled(x: torch.Tensor, wanted: int) -> torch.Tensor:
    """A copy with so many columns; itself where it has them."""
    return x if x.shape[-1] == wanted else pad(x, (0, wanted - x.shape[-1]))
