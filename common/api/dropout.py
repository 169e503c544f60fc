"""Dropout of attention: where the weights are that it drops is drawn from torch's generator of the tensors' device.

The state is drawn as a tensor, outside of the operators: so CUDA graphs, torch.compile and activation checkpointing do
with it as with any random number of torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashladder.common.api import given, op
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem import dropout


class Dropping(NamedTuple):
    """What operators are told of it."""

    dropout_p: float = 0.0
    rng_state: torch.Tensor | None = None


def drawn(dropout_p: float, device: torch.device) -> Dropping:
    """That of a call. UnsupportedProblemError for a dropout_p that is not in [0, 1)."""
    return Dropping(dropout_p, dropout.drawn(device)) if checked(dropout_p) else Dropping()


def dropout_mask(q: torch.Tensor, k: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Which weights of P a call of `attention` keeps: (batch, num_heads, seqlen_q, seqlen_k), for tests.

    q and k are those of the call, of which shapes and q's device are looked at. It draws from torch's generator as
    `attention` does: after the same torch.manual_seed it is that call's mask. That of packed sequences is the mask of a
    batch of them, each from its first row and key on: of q (sequences, max_seqlen_q, heads, head_dim) and likewise k.
    UnsupportedProblemError for a dropout_p that is not in [0, 1), and for tensors of other dimensions.
    """
    given.tensors(q=q, k=k)
    for name, tensor in (("q", q), ("k", k)):
        if tensor.dim() != 4:
            raise op.misshapen(name, tensor)
    dropout_p = checked(dropout_p)
    batch, seqlen_q, num_heads, _ = q.shape
    mask = dropout.kept(dropout.drawn(q.device), dropout_p, range(batch * num_heads), range(seqlen_q), k.shape[1])
    return mask.unflatten(0, (batch, num_heads))


def checked(dropout_p: float) -> float:
    """UnsupportedProblemError for what is no number in [0, 1)."""
    if not 0 <= (p := given.number("dropout_p", dropout_p)) < 1:
        raise UnsupportedProblemError(f"dropout_p={dropout_p}: must be at least 0 and less than 1")
    return p
