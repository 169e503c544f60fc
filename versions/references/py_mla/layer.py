"""A layer of multi-head latent attention, computed in two ways that agree: with keys and values, and without.

Names are DeepSeek-V2's (arXiv:2405.04434, section 2.1), without the compression of queries, which changes nothing here.
The part of a key that is rotated by its position is given: `rotated`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LatentAttention(nn.Module):
    """A cache row of a token is (latent, rotated): head_dim_v + head_dim_rotated numbers, for all heads together."""

    def __init__(self, num_heads: int, head_dim: int, latent: int, rotated: int) -> None:
        super().__init__()
        self.softmax_scale = (head_dim + rotated) ** -0.5  # of what a head compares, whichever way it is computed
        self.up_k = nn.Parameter(torch.randn(num_heads, head_dim, latent) * latent**-0.5)  # W^UK
        self.up_v = nn.Parameter(torch.randn(num_heads, head_dim, latent) * latent**-0.5)  # W^UV

    def expanded(self, q: Tensor, q_rotated: Tensor, cache: Tensor) -> Tensor:
        """As written down: each head makes keys and values of its own from the latents.

        q is (heads, rows, head_dim), q_rotated (heads, rows, rotated), cache (keys, latent + rotated). Returns (heads,
        rows, head_dim).
        """
        latent, rotated = cache.split([self.up_k.shape[2], q_rotated.shape[2]], -1)
        k, v = (latent @ up.mT for up in (self.up_k, self.up_v))  # (heads, keys, head_dim)
        scores = q @ k.mT + q_rotated @ rotated.mT
        return (scores * self.softmax_scale).softmax(-1) @ v

    def absorbed(self, q: Tensor, q_rotated: Tensor, cache: Tensor) -> Tensor:
        """The same without a key or a value: q (W^UK c) = (q W^UK) c, and P (C W^UV^T) = (P C) W^UV^T.

        W^UK goes to the side of q, once a row and not once a key; W^UV to that of the output.
        """
        absorbed_q = torch.cat([q @ self.up_k, q_rotated], -1)  # (heads, rows, latent + rotated)
        o = latent_attention(absorbed_q, cache, self.up_k.shape[2], self.softmax_scale)
        return o @ self.up_v.mT


def latent_attention(q: Tensor, cache: Tensor, head_dim_v: int, softmax_scale: float) -> Tensor:
    """What the ladder computes: q (heads, rows, columns), one cache (keys, columns), whose first columns are V."""
    return (q @ cache.mT * softmax_scale).softmax(-1) @ cache[:, :head_dim_v]
