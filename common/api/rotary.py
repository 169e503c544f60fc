"""Rotary embeddings, as flash_attn_with_kvcache is given them."""

from __future__ import annotations

import torch

from flashladder.common.api import given
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.rotary import Rotary


def rotary_of(
    cos: torch.Tensor | None, sin: torch.Tensor | None, interleaved: bool, q: torch.Tensor, room: int
) -> Rotary | None:
    """What turns q and new keys, if anything does.

    UnsupportedProblemError for what has no angle for each position of a cache with so much room.
    """
    if cos is None and sin is None:
        return None
    given.tensors(rotary_cos=cos, rotary_sin=sin)
    assert cos is not None
    assert sin is not None
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        fits = table.dim() == 2 and table.shape == cos.shape and table.shape[0] >= room
        if not fits or not 0 < 2 * table.shape[1] <= q.shape[-1] or (table.dtype, table.device) != (q.dtype, q.device):
            raise UnsupportedProblemError(
                f"{name} is {tuple(table.shape)} {table.dtype} on {table.device}; with q and the cache it is "
                f"(positions, columns), at least {room} and up to {q.shape[-1] // 2}, {q.dtype} on {q.device}"
            )
    return Rotary(cos, sin, interleaved)
