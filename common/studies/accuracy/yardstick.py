"""A plain FlashAttention-2 in torch: the yardstick where the official kernel does not run.

Blocks of 64 keys from the last, an online softmax with every maximum, P rounded to 16 bits for P V alone: the sum and
all that is accumulated is fp32.
"""

from __future__ import annotations

import math

import torch

from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.problem import Problem

NAME = "plain"
BLOCK_N = 64


def run(problem: Problem, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """O in the inputs' dtype, (batch, seqlen_q, num_heads, head_dim_v), and LSE in fp32. Takes no causal mask."""
    dtype, unit = tensors.q.dtype, problem.softmax_scale * math.log2(math.e)
    q, k, v = (tensors.by_name[name].transpose(1, 2).float() for name in tensors.problem.inputs[:3])
    seqlen_q = q.shape[2]
    q = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # all rows that see one head of K
    highest = q.new_full((*q.shape[:3], 1), -math.inf)
    total, o = torch.zeros_like(highest), q.new_zeros((*q.shape[:3], v.shape[3]))
    for end in range(problem.seqlen_k, 0, -BLOCK_N):
        keys = slice(max(0, end - BLOCK_N), end)
        scores = q @ k[:, :, keys].transpose(2, 3)
        before, highest = highest, torch.maximum(highest, scores.amax(-1, keepdim=True) * unit)
        p = (scores.double() * unit - highest).exp2().float()  # as one FFMA rounds it
        rescale = (before - highest).exp2()
        total = total * rescale + p.sum(-1, keepdim=True)
        o = o * rescale + p.to(dtype).float() @ v[:, :, keys]
    lse = (highest + total.log2()) * math.log(2)
    o, lse = (x.unflatten(2, (-1, seqlen_q)).flatten(1, 2) for x in (o / total, lse))
    return o.to(dtype).transpose(1, 2), lse[..., 0]
