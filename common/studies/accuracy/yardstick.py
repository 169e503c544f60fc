"""A plain FlashAttention-2 in torch: the yardstick where the official kernel does not run.

Forward, blocks of 64 keys from the last, an online softmax with every maximum, P rounded to 16 bits for P V alone: the
sum and all that is accumulated is fp32. Backward, P and dS are rounded, O comes rounded, and all else is fp32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.operations.forward import full_precision_matmul, heads_of, kept, masked_scores
from flashladder.common.problem.problem import Problem
from flashladder.common.studies.accuracy.deviation import GRADIENTS

NAME = "plain"
BLOCK_N = 64


def run(problem: Problem, tensors: Tensors) -> tuple[torch.Tensor, ...]:
    """The outputs in their order: O and LSE, or dQ, dK and dV in the inputs' dtype."""
    if problem.outputs == GRADIENTS:
        return tuple(x.to(tensors.q.dtype) for x in gradients(problem, tensors.by_name).values())
    return attention(problem, tensors)


def attention(problem: Problem, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
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


def gradients(
    problem: Problem, tensors: Mapping[str, torch.Tensor], share: float = 1.0, number: int = 0
) -> dict[str, torch.Tensor]:
    """dQ, dK and dV, rounded, in fp64, like q, k and v. Only `share` of dP is left; `number` counts sequences."""
    p = problem
    made = {f"d{name}": torch.zeros_like(tensors[name], dtype=torch.float64) for name in "qkv"}
    dtype, rows = tensors["q"].dtype, slice(0, p.seqlen_q)
    for batch in range(p.batch):
        q, k, v, o, dout = heads_of(p, tensors, ("q", "k", "v", "o", "dout"), batch, torch.float32)
        with full_precision_matmul():
            scores = masked_scores(p, tensors, batch, q, k, rows)
            weights = (scores - tensors["lse"][batch, ..., None]).exp().nan_to_num(nan=0)  # no key is seen: inf - inf
            delta = (dout * o).sum(-1) - (tensors["dlse"][batch] if "dlse" in tensors else 0)
            dp = kept(p, tensors, number + batch, rows, dout @ v.mT * share)
            of_dp = weights
            if p.softcap:
                slope = 1 - torch.tanh((q * p.softmax_scale) @ k.mT / p.softcap) ** 2
                of_dp = (weights * slope).to(dtype).float()
            ds = (of_dp * (dp - delta[..., None])).to(dtype).float()
            weights = kept(p, tensors, number + batch, rows, weights).to(dtype).float()
            found = {"dq": p.softmax_scale * ds @ k, "dk": p.softmax_scale * ds.mT @ q, "dv": weights.mT @ dout}
        for name, gradient in found.items():
            heads = made[name].shape[2]
            made[name][batch] = gradient.unflatten(0, (heads, -1)).sum(1).to(dtype).transpose(0, 1)
    return made
