"""FlashAttention-2's algorithm (Dao 2023, arXiv:2307.08691): a tile of Q stays, K and V pass by.

    O = softmax(scale * Q K^T) V        for one head; the leading dimensions (batch, heads) are many of them at once

The names are the paper's. What `hbm.load` gives and what is computed from it is in SRAM, a tile at a time; everything
else is in HBM. The loop over the tiles of Q is a loop in name only: its turns have nothing to do with each other, and
on a GPU each is a CTA. The rungs of the ladder are this file, ever closer to the machine.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from flashladder.common.measure.references import tiling
from flashladder.common.measure.references.tiling import Hbm, Tiling, precision, tiles


def forward(q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, hbm: Hbm) -> tuple[Tensor, Tensor]:
    """Algorithm 1. o like q; lse = m + log(l), one number a row.

    O_i, m and l live in SRAM until all keys have passed, and only then is O_i divided by l. m starts at the lowest
    finite number, which unlike minus infinity can be subtracted from itself.
    """
    o = q.new_empty(q.shape)
    lse = torch.empty(q.shape[:-1], dtype=precision(q), device=q.device)

    for rows in tiles(q.shape[-2], tiling.block_m):
        Q_i = hbm.load("Q", q[..., rows, :])
        O_i = torch.zeros_like(Q_i)
        l = torch.zeros_like(Q_i[..., 0])  # noqa: E741
        m = torch.full_like(l, torch.finfo(l.dtype).min)
        for keys in tiles(k.shape[-2], tiling.block_n):
            if tiling.mask.hides(rows, keys):
                break
            K_j, V_j = hbm.load("K", k[..., keys, :]), hbm.load("V", v[..., keys, :])

            S_ij = tiling.mask.apply(tiling.softmax_scale * Q_i @ K_j.mT, rows, keys)
            m_new = torch.maximum(m, S_ij.amax(-1))
            P_ij = torch.exp(S_ij - m_new[..., None])
            rescale = torch.exp(m - m_new)  # what was summed before the maximum grew is worth this much now
            l = rescale * l + P_ij.sum(-1)  # noqa: E741
            O_i = rescale[..., None] * O_i + P_ij @ V_j
            m = m_new

        hbm.store("O", o[..., rows, :], O_i / l.masked_fill(l == 0, 1)[..., None])
        hbm.store("lse", lse[..., rows], m + torch.log(l))
    return o, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, grad_o: Tensor, tiling: Tiling, hbm: Hbm
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2: dQ, dK and dV. P is computed again, tile by tile: P_ij = exp(S_ij - lse_i).

    Here the tiles of K and V are the independent ones, as dK_j and dV_j are sums over the rows of Q; dQ_i travels (on a
    GPU: is added to by many CTAs). D, a number a row, is computed once, so that O need not pass.
    """
    D = torch.empty_like(lse)
    hbm.store("D", D, (hbm.load("dO", grad_o) * hbm.load("O", o)).sum(-1))
    dq = torch.zeros(q.shape, dtype=precision(q), device=q.device)
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)

    for keys in tiles(k.shape[-2], tiling.block_n):
        K_j, V_j = hbm.load("K", k[..., keys, :]), hbm.load("V", v[..., keys, :])
        dK_j, dV_j = torch.zeros_like(K_j), torch.zeros_like(V_j)
        for rows in tiles(q.shape[-2], tiling.block_m):
            if tiling.mask.hides(rows, keys):
                continue
            Q_i, dO_i, dQ_i = (
                hbm.load(name, tensor[..., rows, :]) for name, tensor in (("Q", q), ("dO", grad_o), ("dQ", dq))
            )
            lse_i, D_i = hbm.load("lse", lse[..., rows]), hbm.load("D", D[..., rows])

            S_ij = tiling.mask.apply(tiling.softmax_scale * Q_i @ K_j.mT, rows, keys)
            P_ij = torch.exp(S_ij - lse_i.masked_fill(lse_i == -math.inf, 0)[..., None])
            dV_j += P_ij.mT @ dO_i
            dP_ij = dO_i @ V_j.mT
            dS_ij = P_ij * (dP_ij - D_i[..., None])
            dK_j += tiling.softmax_scale * dS_ij.mT @ Q_i
            hbm.store("dQ", dq[..., rows, :], dQ_i + tiling.softmax_scale * dS_ij @ K_j)
        hbm.store("dK", dk[..., keys, :], dK_j)
        hbm.store("dV", dv[..., keys, :], dV_j)
    return dq.to(q.dtype), dk, dv


algorithm = forward, backward
prepare, toolkit = partial(tiling.prepare, algorithm), tiling.toolkit
