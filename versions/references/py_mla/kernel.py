"""Multi-head latent attention, decode: one row of the cache a key, which is K and V of all heads at once.

    O = softmax(scale * Q C^T) C[:, :head_dim_v]        for all heads, and a cache C of one row a key

It is py_decode with one load where that has two. layer.py says how a model comes to such a cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from flashladder.common.measure.references import Prepared
from flashladder.common.measure.references.tiling import Hbm
from flashladder.common.problem.config import KernelConfig
from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.problem import Problem
from flashladder.versions.references.py_decode import kernel as py_decode


def attend(
    q: Tensor, blocks: Iterator[Tensor], first: int, seen: Tensor, head_dim_v: int, hbm: Hbm
) -> tuple[Tensor, Tensor]:
    """O of some keys, as if there were no others, and its log-sum-exp: q (rows, head_dim) is scaled already.

    `blocks` are tiles of the cache, of the keys from `first` on; row i sees the keys before seen[i].
    """
    o = torch.zeros_like(q[:, :head_dim_v])
    l = torch.zeros_like(q[:, 0])  # noqa: E741
    m = torch.full_like(l, torch.finfo(l.dtype).min)
    for block in blocks:
        K_j = hbm.load("cache", block)
        V_j = K_j[:, :head_dim_v]  # nothing more is read
        key = torch.arange(first, first + len(block), device=q.device)
        first += len(block)

        S_j = (q @ K_j.mT).masked_fill(key >= seen[:, None], -math.inf)
        m_new = torch.maximum(m, S_j.amax(-1))
        P_j = torch.exp(S_j - m_new[:, None])
        rescale = torch.exp(m - m_new)
        l = rescale * l + P_j.sum(-1)  # noqa: E741
        o = rescale[:, None] * o + P_j @ V_j
        m = m_new
    return o / l.masked_fill(l == 0, 1)[:, None], m + torch.log(l)


def decode(problem: Problem, tensors: Tensors, block_n: int, hbm: Hbm) -> None:
    """Fills o and lse."""
    p, group = problem, problem.num_heads // problem.num_heads_k
    num_splits = p.asked.argument(p, "num_splits")
    row = torch.arange(p.seqlen_q, device=tensors.device).repeat_interleave(group)
    for batch in range(p.batch):
        length = int(tensors.cache_seqlens[batch])
        starts = [length * split // num_splits for split in range(num_splits + 1)]
        seen = length - p.seqlen_q + 1 + row if p.causal else torch.full_like(row, length)
        for head in range(p.num_heads_k):
            heads = slice(head * group, (head + 1) * group)
            q = hbm.load("Q", tensors.q[batch, :, heads]).flatten(0, 1) * p.softmax_scale
            parts = []
            for begin, end in pairwise(starts):
                keys = py_decode.keys_of(p, tensors, batch, head, begin, end, block_n)
                parts.append(attend(q, (k for k, _ in keys), begin, seen, p.head_dim_v, hbm))
            o, lse = py_decode.combine(parts)
            lse = lse.masked_fill(lse == -math.inf, math.inf)  # of a row that sees no key, as FlashMLA's
            hbm.store("O", tensors.o[batch, :, heads], o.unflatten(0, (p.seqlen_q, group)))
            if p.lse:
                hbm.store("lse", tensors.lse[batch, heads], lse.unflatten(0, (p.seqlen_q, group)).mT)


def prepare(problem: Problem, config: KernelConfig, tensors: Tensors) -> Prepared:
    """Decode on these tensors, with the traffic of its latest run."""
    latest = Hbm()

    def launch() -> None:
        nonlocal latest
        latest = Hbm()
        decode(problem, tensors, config.block_n, latest)

    return Prepared(launch, lambda: py_decode.facts(problem, latest))


toolkit = py_decode.toolkit
