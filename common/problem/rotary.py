"""Rotary embeddings (Su et al., arXiv:2104.09864): pairs of columns that turn by angles of a row's position."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Rotary(NamedTuple):
    """By which angles the first columns of a row turn: cos and sin are (positions, half of these columns).

    A pair of columns turns together: 2 i and 2 i + 1 where they are interleaved, else i and i + half of them.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool

    def turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x, (batch, rows, heads, head_dim), at positions (batch, rows): computed in fp32, and rounded once.

        Rows beyond the last position of the tables turn as that one.
        """
        count, half = self.cos.shape
        positions = positions.clamp(max=count - 1)
        cos, sin = (table[positions].float()[:, :, None] for table in (self.cos, self.sin))
        columns = x[..., : 2 * half].float()
        a, b = (columns[..., 0::2], columns[..., 1::2]) if self.interleaved else columns.split(half, -1)
        pair = a * cos - b * sin, a * sin + b * cos
        made = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return torch.cat((made.to(x.dtype), x[..., 2 * half :]), -1)
