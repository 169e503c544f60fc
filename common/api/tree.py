"""Draft trees, whose tokens are verified in one step."""

from __future__ import annotations

import torch

from flashladder.common.api import validate
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem import tree


def tree_mask(parents: torch.Tensor) -> torch.Tensor:
    """Which tokens of a draft tree each one sees: (batch, tokens), int32, as flash_attn_with_kvcache takes it.

    parents, (batch, tokens), int32 or int64, has each token's parent: one before it, or -1 for none. A token sees
    itself, its parent, that one's parent, and so on: bit i of its mask is token i. These are torch's operators; a mask
    serves all layers of a step. Raises UnsupportedProblemError for what is no tree of up to 32 tokens.
    """
    return tree.masks_of(parents_of(parents, 2, tree.MOST_ROWS))


def parents_of(parents: torch.Tensor, dimensions: int, most: int | None = None) -> torch.Tensor:
    """Each token's parent, (..., tokens), validated; UnsupportedProblemError for what is no tree of `most` tokens."""
    found = validate.tensor("parents", parents)
    tokens = found.shape[-1] if found.dim() else 0
    if found.dim() != dimensions or found.dtype not in (torch.int32, torch.int64) or (most and tokens > most):
        shape = "(batch, tokens)" if dimensions == 2 else "(tokens,)"
        raise UnsupportedProblemError(
            f"parents is {tuple(found.shape)} {found.dtype}; it should be {shape} torch.int32 or torch.int64"
            + (f", of up to {most} tokens" if most else "")
        )
    if validate.can_look_at(found) and not ((found >= -1) & (found < torch.arange(tokens))).all():
        raise UnsupportedProblemError(f"parents={found.tolist()}: each is a token before its own, or -1 for none")
    return found
