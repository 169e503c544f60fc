"""Rotary embeddings (Su et al., arXiv:2104.09864), as flash_attn_with_kvcache applies them to Q and new keys."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashladder.common.api import given
from flashladder.common.errors import UnsupportedProblemError


class Rotary(NamedTuple):
    """By which angles the first columns of a row turn: cos and sin are (positions, half of these columns).

    A pair of columns turns together: 2 i and 2 i + 1 where they are interleaved, else i and i + half of them.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool

    def turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x, (batch, rows, heads, head_dim), at positions (batch, rows): computed in fp32, and rounded once."""
        half = self.cos.shape[1]
        cos, sin = (table[positions].float()[:, :, None] for table in (self.cos, self.sin))
        columns = x[..., : 2 * half].float()
        a, b = (columns[..., 0::2], columns[..., 1::2]) if self.interleaved else columns.split(half, -1)
        pair = a * cos - b * sin, a * sin + b * cos
        made = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return torch.cat((made.to(x.dtype), x[..., 2 * half :]), -1)


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
