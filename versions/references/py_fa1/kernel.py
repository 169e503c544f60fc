"""FlashAttention's first algorithm (Dao et al. 2022, arXiv:2205.14135): a tile of K and V stays, Q passes by.

    O = softmax(scale * Q K^T) V        for one head; the leading dimensions (batch, heads) are many of them at once

The names are the paper's. What `hbm.load` gives and what is computed from it is in SRAM, a tile at a time; everything
else is in HBM. S = Q K^T is never there as a whole.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from flashladder.common.measure.references import tiling
from flashladder.common.measure.references.tiling import Hbm, Tiling, precision, tiles


def forward(q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, hbm: Hbm) -> tuple[Tensor, Tensor]:
    """Algorithm 1 and 2. o like q; lse = m + log(l), one number a row.

    O_i is the right answer for the keys seen so far. Another tile of keys changes it, so that it travels to SRAM and
    back for each of them, with its row's maximum m_i and sum l_i. m starts at the lowest finite number, which unlike
    minus infinity can be subtracted from itself.
    """
    rows_of, lowest = q.shape[:-1], torch.finfo(precision(q)).min
    o = torch.zeros(q.shape, dtype=precision(q), device=q.device)
    l = torch.zeros(rows_of, dtype=o.dtype, device=q.device)  # noqa: E741
    m = torch.full(rows_of, lowest, dtype=o.dtype, device=q.device)

    for keys in tiles(k.shape[-2], tiling.block_n):
        K_j, V_j = hbm.load("K", k[..., keys, :]), hbm.load("V", v[..., keys, :])
        for rows in tiles(q.shape[-2], tiling.block_m):
            if tiling.mask.hides(rows, keys):
                continue
            Q_i, O_i = hbm.load("Q", q[..., rows, :]), hbm.load("O", o[..., rows, :])
            l_i, m_i = hbm.load("l", l[..., rows]), hbm.load("m", m[..., rows])

            S_ij = tiling.mask.apply(tiling.softmax_scale * Q_i @ K_j.mT, rows, keys)
            m_ij = S_ij.amax(-1).clamp(min=lowest)
            P_ij = torch.exp(S_ij - m_ij[..., None])
            l_ij = P_ij.sum(-1)

            m_new = torch.maximum(m_i, m_ij)
            old, new = l_i * torch.exp(m_i - m_new), torch.exp(m_ij - m_new)
            l_new = old + new * l_ij
            weighted = old[..., None] * O_i + new[..., None] * (P_ij @ V_j)

            hbm.store("O", o[..., rows, :], weighted / l_new.masked_fill(l_new == 0, 1)[..., None])
            hbm.store("l", l[..., rows], l_new)
            hbm.store("m", m[..., rows], m_new)

    rounded = q.new_empty(q.shape)
    hbm.store("O", rounded, hbm.load("O", o))
    return rounded, m + torch.log(l)


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, grad_o: Tensor, tiling: Tiling, hbm: Hbm
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 4: dQ, dK and dV. P is computed again, tile by tile: P_ij = exp(S_ij - lse_i).

    dK_j and dV_j stay in SRAM while Q passes by; dQ_i travels.
    """
    dq = torch.zeros(q.shape, dtype=precision(q), device=q.device)
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)

    for keys in tiles(k.shape[-2], tiling.block_n):
        K_j, V_j = hbm.load("K", k[..., keys, :]), hbm.load("V", v[..., keys, :])
        dK_j, dV_j = torch.zeros_like(K_j), torch.zeros_like(V_j)
        for rows in tiles(q.shape[-2], tiling.block_m):
            if tiling.mask.hides(rows, keys):
                continue
            Q_i, O_i = hbm.load("Q", q[..., rows, :]), hbm.load("O", o[..., rows, :])
            dO_i, dQ_i = hbm.load("dO", grad_o[..., rows, :]), hbm.load("dQ", dq[..., rows, :])
            lse_i = hbm.load("lse", lse[..., rows])

            S_ij = tiling.mask.apply(tiling.softmax_scale * Q_i @ K_j.mT, rows, keys)
            P_ij = torch.exp(S_ij - lse_i.masked_fill(lse_i == -math.inf, 0)[..., None])
            dV_j += P_ij.mT @ dO_i
            dP_ij = dO_i @ V_j.mT
            D_i = (dO_i * O_i).sum(-1)  # how far a row's outputs, taken together, would move
            dS_ij = P_ij * (dP_ij - D_i[..., None])
            dK_j += tiling.softmax_scale * dS_ij.mT @ Q_i
            hbm.store("dQ", dq[..., rows, :], dQ_i + tiling.softmax_scale * dS_ij @ K_j)
        hbm.store("dK", dk[..., keys, :], dK_j)
        hbm.store("dV", dv[..., keys, :], dV_j)
    return dq.to(q.dtype), dk, dv


algorithm = forward, backward
prepare, toolkit = partial(tiling.prepare, algorithm), tiling.toolkit
