"""Packed sequences: tokens of all sequences in one tensor, and where each sequence begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flashladder.common.api import attention, differentiable, expressions, sequences, validate
from flashladder.common.api.documents import Padding
from flashladder.common.api.options import options_of
from flashladder.common.api.validate import BATCH, OPEN, PACKED, Window
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
    mask: str | None = None,
    score: str | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
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
    are those of `attention`, `deterministic` among them; alibi_slopes are (num_heads,) or (sequences, num_heads). In
    expressions b is the number of a sequence, whose own positions and lengths are q, k, seqlen_q and seqlen_k.

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
    if mask is not None or score is not None or tensors is not None:
        options = expressions.options_with(options, mask, score, tensors, q[None], k[None])
    o, lse = differentiable.attend(q[None], k[None], v[None], options, return_lse)
    return (o[0], lse) if return_lse else o[0]


def without_padding(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding: Padding, **options: Any
) -> torch.Tensor:
    """O of a padded batch, (batch, seqlen_q, heads, head_dim): of the rows and keys that are no padding, packed.

    A row that is padding gives 0. The options are those of `attention`.
    """
    rows, keys, first_keys = padding
    if first_keys is not None:
        return only_o(attention(q, k[:, :first_keys], v[:, :first_keys], **options))
    packed = (rows.pack(q), keys.pack(k), keys.pack(v))
    o = only_o(packed_attention(*packed, rows.cu_seqlens, keys.cu_seqlens, rows.longest, keys.longest, **options))
    return o.unflatten(0, q.shape[:2]) if rows.is_all else rows.unpack(o, q.new_empty((*q.shape[:3], v.shape[3])))


def attention_in_documents(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor, **options: Any
) -> torch.Tensor:
    """O of a batch under a causal mask, (batch, seqlen_q, heads, head_dim), whose rows see their own document alone.

    `documents` says of which one each key is, (batch, seqlen_k), int32, on the CPU; 0 is padding, which gives 0. Nobody
    reads it before the operator runs: torch.compile cannot. The options are `Options`'.
    """
    q, k, v = validate.inputs(BATCH, q, k, v)
    asked = {"alibi_slopes": None, "deterministic": False, "version": FASTEST, **options, "documents": documents}
    return differentiable.attend(q, k, v, options_of(q.device, q.shape[0], q.shape[2], causal=True, **asked), False)[0]


def only_o(o: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """What comes back where the log-sum-exp is not asked for."""
    assert isinstance(o, torch.Tensor)
    return o
