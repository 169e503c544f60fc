"""Rotary embeddings, as flash_attn_with_kvcache is given them."""

from __future__ import annotations

import torch

from flashladder.common.api import validate
from flashladder.common.problem.rotary import Rotary


def rotary_of(
    cos: torch.Tensor | None, sin: torch.Tensor | None, interleaved: bool, q: torch.Tensor, room: int
) -> Rotary:
    """What turns q and new keys.

    UnsupportedProblemError for what has no angle for each position of a cache with so much room.
    """
    cos, sin = validate.tensors(rotary_cos=cos, rotary_sin=sin)
    alike = cos.shape

    def fits(shape: torch.Size) -> bool:
        if len(shape) != 2 or validate.differ(shape, alike) or validate.surely(shape[0] < room):
            return False
        return bool(0 < 2 * shape[1] <= q.shape[-1])

    wanted = f"with q and the cache it is (positions, columns), at least {room} and up to {q.shape[-1] // 2},"
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        validate.like(name, table, fits, q.dtype, q.device, wanted)
    return Rotary(cos, sin, interleaved)
