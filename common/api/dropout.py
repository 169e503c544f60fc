"""Which weights dropout of attention leaves.

A call draws from torch's generator of the tensors' device a state, as a tensor and outside of the operators: so CUDA
graphs, torch.compile and activation checkpointing do with it as with any random number of torch.
"""

from __future__ import annotations

import torch

from flashladder.common.api import validate
from flashladder.common.problem import dropout


def dropout_mask(q: torch.Tensor, k: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Which weights of P a call of `attention` keeps: (batch, num_heads, seqlen_q, seqlen_k), for tests.

    q and k are those of the call, of which shapes and q's device are looked at. It draws from torch's generator as
    `attention` does: after the same torch.manual_seed it is that call's mask. That of packed sequences is the mask of a
    batch of them, each from its first row and key on: of q (sequences, max_seqlen_q, heads, head_dim) and likewise k.
    UnsupportedProblemError for a dropout_p that is not in [0, 1), and for tensors of other dimensions.
    """
    q, k = validate.tensors(validate.BATCH, q=q, k=k)
    dropout_p = validate.probability("dropout_p", dropout_p)
    batch, seqlen_q, num_heads, _ = q.shape
    mask = dropout.kept(dropout.drawn(q.device), dropout_p, range(batch * num_heads), range(seqlen_q), k.shape[1])
    return mask.unflatten(0, (batch, num_heads))
