"""Packed sequences: tokens of all sequences in one tensor, and where each sequence begins."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from flashladder.common.attention import general, given, gradients, sequences
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.run.ahead import DEFAULT


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: general.Window = general.OPEN,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_lse: bool = False,
    version: str = DEFAULT,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`attention` within each of many sequences, in one launch; forward only.

    q is (total_q, num_heads, head_dim), k and v are (total_k, num_heads_k, head_dim). Sequence i has the rows
    cu_seqlens_q[i] to cu_seqlens_q[i + 1] of q, and likewise of k and v; both are (sequences + 1), int32, on q's
    device. A sequence may have no rows; none has more than max_seqlen_q and max_seqlen_k. Returns O, shaped as q, and
    with `return_lse` also the log-sum-exps, (num_heads, total_q), fp32. Rows of q behind the last sequence, and those
    that see no key, have O = 0 and a log-sum-exp of -inf. The options are those of `attention`; alibi_slopes are
    (num_heads,) or (sequences, num_heads).

    The first call with a cu_seqlens reads it, to refuse what is wrong: that waits for the GPU.

    Raises UnsupportedProblemError for cu_seqlens that are no sequences of these tensors, and as `attention` does.
    """
    given.tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    given.flags(causal=causal, return_lse=return_lse)
    given.text(version=version)
    longest = given.rows("max_seqlen_q", max_seqlen_q), given.rows("max_seqlen_k", max_seqlen_k)
    softmax_scale = None if softmax_scale is None else given.number("softmax_scale", softmax_scale)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 3:
            raise UnsupportedProblemError(
                f"{name} has shape {tuple(tensor.shape)}; packed, it is (total, heads, head_dim)"
            )
    if k.shape != v.shape:
        raise UnsupportedProblemError(f"v is {tuple(v.shape)}; with k it is {tuple(k.shape)}")
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        sequences.check(name, cu_seqlens, q.device)
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise UnsupportedProblemError(
            f"cu_seqlens_q is of {len(cu_seqlens_q) - 1} sequences, cu_seqlens_k of {len(cu_seqlens_k) - 1}"
        )
    gradients.refuse(q, k, v)
    packing = (cu_seqlens_q, cu_seqlens_k, *longest)
    slopes = general.slopes_of(alibi_slopes, q, len(cu_seqlens_q) - 1)
    bounds = (*general.window_of(window), given.number("softcap", softcap), slopes)
    o, lse = general.forward(q[None], k[None], v[None], *packing, causal, softmax_scale, *bounds, version, return_lse)
    return (o[0], lse) if return_lse else o[0]


def without_padding(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, **options: Any
) -> torch.Tensor:
    """O of a padded batch, (batch, seqlen_q, heads, head_dim): of the rows and keys that are no padding, packed.

    rows is (batch, seqlen_q), keys (batch, seqlen_k), true for what is no padding. A row that is padding gives 0.
    """
    cu_rows, cu_keys = (pad(real.sum(1).cumsum(0), (1, 0)).to(torch.int32) for real in (rows, keys))
    at_rows, at_keys = (real.nonzero(as_tuple=True) for real in (rows, keys))  # found once: it waits for the GPU
    packed = (q[at_rows], k[at_keys], v[at_keys], cu_rows, cu_keys, rows.shape[1], keys.shape[1])
    o = q.new_zeros(q.shape)
    o[at_rows] = only_o(packed_attention(*packed, **options))
    return o


def only_o(o: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """What comes back where the log-sum-exp is not asked for."""
    assert isinstance(o, torch.Tensor)
    return o
