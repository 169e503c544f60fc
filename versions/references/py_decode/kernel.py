"""Decode attention: one query row a sequence, or a few, against a cache of keys and values.

    O = softmax(scale * Q K^T) V        for one head of K and V, and all rows of Q that share it

What `hbm.load` gives and what is computed from it is in SRAM; everything else is in HBM. The keys are cut into parts.
Each part is FlashAttention-2's loop over its own keys, with no other part to wait for: on a GPU each is a CTA. Two
numbers a row, its part of O and the log-sum-exp, are all that a combination needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from flashladder.common.measure.references import Prepared
from flashladder.common.measure.references.tiling import Hbm, tiles
from flashladder.common.problem.config import KernelConfig
from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.problem import Problem


def attend(
    q: Tensor, blocks: Iterator[tuple[Tensor, Tensor]], first: int, seen: Tensor, hbm: Hbm
) -> tuple[Tensor, Tensor]:
    """O of some keys, as if there were no others, and its log-sum-exp: q (rows, head_dim) is scaled already.

    `blocks` are K and V, in tiles, of the keys from `first` on; row i sees the keys before seen[i].
    """
    o = torch.zeros_like(q)
    l = torch.zeros_like(q[:, 0])  # noqa: E741
    m = torch.full_like(l, torch.finfo(l.dtype).min)
    for k, v in blocks:
        K_j, V_j = hbm.load("K", k), hbm.load("V", v)
        key = torch.arange(first, first + len(k), device=q.device)
        first += len(k)

        S_j = (q @ K_j.mT).masked_fill(key >= seen[:, None], -math.inf)
        m_new = torch.maximum(m, S_j.amax(-1))
        P_j = torch.exp(S_j - m_new[:, None])
        rescale = torch.exp(m - m_new)
        l = rescale * l + P_j.sum(-1)  # noqa: E741
        o = rescale[:, None] * o + P_j @ V_j
        m = m_new
    return o / l.masked_fill(l == 0, 1)[:, None], m + torch.log(l)


def combine(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """O of all keys from the parts': each weighs as much as the exponentials that it has summed."""
    o, lse = (torch.stack(each) for each in zip(*parts, strict=True))
    whole = torch.logsumexp(lse, 0)
    weights = torch.exp(lse - whole.masked_fill(whole == -math.inf, 0))
    return (weights[..., None] * o).sum(0), whole


def decode(problem: Problem, tensors: Tensors, block_n: int, hbm: Hbm) -> None:
    """Fills o and lse."""
    p, group = problem, problem.num_heads // problem.num_heads_k
    num_splits = p.asked.argument(p, "num_splits")
    for batch in range(p.batch):
        length = int(tensors.cache_seqlens[batch])
        starts = [length * split // num_splits for split in range(num_splits + 1)]
        row = torch.arange(p.seqlen_q, device=tensors.device).repeat_interleave(group)
        seen = length - p.seqlen_q + 1 + row if p.causal else torch.full_like(row, length)
        for head in range(p.num_heads_k):
            heads = slice(head * group, (head + 1) * group)
            # The rows of the whole group, packed: (seqlen_q * group, head_dim).
            q = hbm.load("Q", tensors.q[batch, :, heads]).flatten(0, 1) * p.softmax_scale
            parts = []
            for begin, end in pairwise(starts):
                blocks = keys_of(p, tensors, batch, head, begin, end, block_n)
                parts.append(attend(q, blocks, begin, seen, hbm))
            o, lse = combine(parts)
            hbm.store("O", tensors.o[batch, :, heads], o.unflatten(0, (p.seqlen_q, group)))
            if p.lse:
                hbm.store("lse", tensors.lse[batch, heads], lse.unflatten(0, (p.seqlen_q, group)).mT)


def keys_of(
    problem: Problem, tensors: Tensors, batch: int, head: int, begin: int, end: int, block_n: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Tiles of K and V of a sequence; with pages, each key is looked up in the block table."""
    for tile in tiles(end - begin, block_n):
        keys = torch.arange(begin + tile.start, begin + tile.stop, device=tensors.device)
        if problem.paged:
            page, row = tensors.block_table[batch, keys // problem.page_size], keys % problem.page_size
        else:
            page, row = torch.full_like(keys, batch), keys
        yield tensors.k_cache[page, row, head], tensors.v_cache[page, row, head]


def prepare(problem: Problem, config: KernelConfig, tensors: Tensors) -> Prepared:
    """Decode on these tensors, with the traffic of its latest run."""
    latest = Hbm()

    def launch() -> None:
        nonlocal latest
        latest = Hbm()
        decode(problem, tensors, config.block_n, latest)

    return Prepared(launch, lambda: facts(problem, latest))


def facts(problem: Problem, hbm: Hbm) -> dict[str, str]:
    """Its traffic, and what that means for a GPU."""
    read = ", ".join(f"{name} {count / 2**20:.3f}" for name, count in hbm.read.items())
    per_byte = problem.flops / hbm.total
    return {
        "HBM to SRAM": f"{hbm.read.total() / 2**20:.3f} MiB: {read}",
        "SRAM to HBM": f"{hbm.written.total() / 2**20:.3f} MiB",
        "FLOPs per byte": f"{per_byte:.1f}; an H200 could do 206 (989 TFLOP/s, 4.8 TB/s)",
    }


def toolkit() -> str:
    """torch compiles nothing here, and runs it."""
    return f"torch {torch.__version__}"
