"""Packed sequences: tokens of all sequences in one tensor, and where each sequence begins."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from flashladder.common.api import attention, differentiable, sequences, validate
from flashladder.common.api.options import options_of
from flashladder.common.api.validate import OPEN, PACKED, Window
from flashladder.common.catalog import FASTEST
from flashladder.common.errors import UnsupportedProblemError


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
    window: Window = OPEN,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    version: str = FASTEST,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`attention` within each of many sequences, in one launch. Differentiable.

    q is (total_q, num_heads, head_dim), k (total_k, num_heads_k, head_dim), v (total_k, num_heads_k, head_dim_v).
    Sequence i has the rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] of q, and likewise of k and v; both are
    (sequences + 1), int32, on q's device. A sequence may have no rows; there may be none; none has more rows than
    max_seqlen_q and max_seqlen_k. Returns O, (total_q, num_heads, head_dim_v), and with `return_lse` also the log-sum-
    exps, (num_heads, total_q), fp32. Rows of q behind the last sequence, and those that see no key, have O = 0 and a
    log-sum-exp of -inf, or, with sinks, the sink. Gradients of rows behind the last sequence count nowhere. The options
    are those of `attention`, `deterministic` among them; alibi_slopes are (num_heads,) or (sequences, num_heads).

    The first call with a cu_seqlens reads it, to refuse what is wrong: that waits for the GPU.

    Raises UnsupportedProblemError for cu_seqlens that are no sequences of these tensors, and as `attention` does.
    """
    q, k, v = validate.inputs(PACKED, q, k, v)
    return_lse = validate.flag("return_lse", return_lse)
    cu_seqlens_q, cu_seqlens_k = (
        sequences.validate_starts(name, cu_seqlens, q.device)
        for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))
    )
    count, count_k = cu_seqlens_q.shape[0] - 1, cu_seqlens_k.shape[0] - 1
    if validate.surely(count != count_k):
        raise UnsupportedProblemError(f"cu_seqlens_q is of {count} sequences, cu_seqlens_k of {count_k}")
    options = options_of(
        q.device,
        count,
        q.shape[1],
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=validate.rows("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=validate.rows("max_seqlen_k", max_seqlen_k),
        causal=causal,
        softmax_scale=softmax_scale,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_p=dropout_p,
        deterministic=deterministic,
        version=version,
    )
    o, lse = differentiable.attend(q[None], k[None], v[None], options, return_lse)
    return (o[0], lse) if return_lse else o[0]


class Real(NamedTuple):
    """Which rows of a padded tensor, (batch, seqlen, ...), are no padding, and where they go when they are packed."""

    places: tuple[torch.Tensor, torch.Tensor]  # the batch and the row of each
    cu_seqlens: torch.Tensor
    longest: int
    is_all: bool  # nothing is padding


class Padding(NamedTuple):
    """What is known of a padded batch without its tensors, so that many layers can share it."""

    rows: Real
    keys: Real
    first_keys: int | None  # where no row is padding, and all see the same keys, these from the first on: how many


def padding_of(rows: torch.Tensor, keys: torch.Tensor) -> Padding:
    """Of masks that are true for what is no padding: (batch, seqlen_q), and (batch, seqlen_k). Waits for the GPU once.

    The masks should not be written to while the result is used.
    """
    rises = keys[:, 1:] & ~keys[:, :-1]
    with torch.inference_mode(False):  # so that torch counts what is written to cu_seqlens
        lengths_q, lengths_k, risen = torch.stack([real.sum(1) for real in (rows, keys, rises)]).tolist()
        real_rows, real_keys = (
            _real(real, real.sum(1), lengths) for real, lengths in ((rows, lengths_q), (keys, lengths_k))
        )
    alike = real_rows.is_all and len(set(lengths_k)) == 1 and not any(risen)
    return Padding(real_rows, real_keys, (lengths_k[0] or None) if alike else None)


def documents_of(rows: torch.Tensor, keys: torch.Tensor) -> Padding:
    """The same where each sequence is made of documents, whose rows see no key of another one.

    Both say of which document something is: whole numbers that do not fall along a sequence, 0 for padding; the rows'
    are the last of the keys'. Waits for the GPU.
    """
    with torch.inference_mode(False):
        first = torch.arange(len(keys), device=keys.device)[:, None] * (keys.max() + 1)  # of another sequence, another
        names, counts_k = (keys + first)[keys > 0].unique_consecutive(return_counts=True)
        own = (rows + first)[rows > 0]
        counts_q = torch.searchsorted(own, names, right=True) - torch.searchsorted(own, names)
        lengths_q, lengths_k = torch.stack((counts_q, counts_k)).tolist()
        return Padding(_real(rows > 0, counts_q, lengths_q), _real(keys > 0, counts_k, lengths_k), None)


def _real(real: torch.Tensor, counts: torch.Tensor, lengths: list[int]) -> Real:
    """Of which rows are real, and how many of each sequence: on the device, and as numbers."""
    total = sum(lengths)
    batches, places = real.nonzero_static(size=total).unbind(1)  # nonzero() would wait for the GPU
    cu_seqlens = pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    sequences.remember(cu_seqlens, [0, *accumulate(lengths)])
    return Real((batches, places), cu_seqlens, max(lengths, default=0), total == real.numel())


def without_padding(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding: Padding, **options: Any
) -> torch.Tensor:
    """O of a padded batch, (batch, seqlen_q, heads, head_dim): of the rows and keys that are no padding, packed.

    A row that is padding gives 0. The options are those of `attention`.
    """
    rows, keys, first_keys = padding
    if first_keys is not None:
        return only_o(attention(q, k[:, :first_keys], v[:, :first_keys], **options))
    q_packed = q.flatten(0, 1) if rows.is_all else q[rows.places]
    packed = (q_packed, k[keys.places], v[keys.places], rows.cu_seqlens, keys.cu_seqlens, rows.longest, keys.longest)
    o_packed = only_o(packed_attention(*packed, **options))
    if rows.is_all:
        return o_packed.unflatten(0, q.shape[:2])
    o = q.new_zeros((*q.shape[:3], v.shape[3]))
    o[rows.places] = o_packed
    return o


def only_o(o: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """What comes back where the log-sum-exp is not asked for."""
    assert isinstance(o, torch.Tensor)
    return o
