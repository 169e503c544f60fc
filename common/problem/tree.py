"""Draft trees: tokens, each behind its parent, of which each sees itself and those above it."""

from __future__ import annotations

import torch

MOST_ROWS = 32  # bits of a mask


def masks_of(parents: torch.Tensor) -> torch.Tensor:
    """The masks of rows, int32, from each row's parent, (batch, rows): a row before it, or -1 for none.

    Bit i is set of a row that sees row i.
    """
    parents = parents.long()
    masks = (1 << torch.arange(parents.shape[1], device=parents.device)).expand(parents.shape)
    for _ in range(parents.shape[1].bit_length()):  # twice as far up each time
        has_parent, above = parents >= 0, parents.clamp(min=0)
        masks = masks | masks.gather(1, above) * has_parent
        parents = parents.gather(1, above).where(has_parent, -1)
    return masks.int()


def draw(masks: torch.Tensor, generator: torch.Generator) -> None:
    """Those of random trees."""
    rows = torch.arange(masks.shape[1], device=generator.device)
    share = torch.rand(masks.shape, generator=generator, device=generator.device)
    masks.copy_(masks_of((share * (rows + 1)).int().minimum(rows) - 1))
