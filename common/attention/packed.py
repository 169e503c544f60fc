"""Packed sequences: tokens of all sequences in one tensor, and where each sequence begins."""

from __future__ import annotations

import itertools
import math

import torch

from flashladder.common.attention import attention
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
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`attention` within each of many sequences; forward only.

    q is (total_q, num_heads, head_dim), k and v are (total_k, num_heads_k, head_dim). Sequence i has the rows
    cu_seqlens_q[i] to cu_seqlens_q[i + 1] of q, and likewise of k and v; both are (sequences + 1), int32, on q's
    device. A sequence may have no rows; none has more than max_seqlen_q and max_seqlen_k. Returns O, shaped as q, and
    with `return_lse` also the log-sum-exps, (num_heads, total_q), fp32. Rows of q behind the last sequence, and those
    that see no key, have O = 0 and a log-sum-exp of -inf.

    It launches a kernel a sequence, and reads both cu_seqlens on the host for that, which waits for the GPU.

    Raises UnsupportedProblemError for cu_seqlens that are no sequences of these tensors, and as `attention` does.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 3:
            raise UnsupportedProblemError(
                f"{name} has shape {tuple(tensor.shape)}; packed, it is (total, heads, head_dim)"
            )
    if k.shape != v.shape:
        raise UnsupportedProblemError(f"v is {tuple(v.shape)}; with k it is {tuple(k.shape)}")
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check(name, cu_seqlens, q.device)
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise UnsupportedProblemError(
            f"cu_seqlens_q is of {len(cu_seqlens_q) - 1} sequences, cu_seqlens_k of {len(cu_seqlens_k) - 1}"
        )
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)):
        raise UnsupportedProblemError(
            "the inputs want a gradient, and kernels compute none: call it in torch.no_grad()"
        )
    o, lse = _packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale, return_lse)
    return (o, lse) if return_lse else o


@torch.library.custom_op("flashladder::packed_attention", mutates_args=())
def _packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    softmax_scale: float | None,
    lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and the log-sum-exp; the latter has no elements unless it is asked for."""
    o, sums = _outputs(q, lse)
    o.zero_()
    sums.fill_(-math.inf)
    queries = _slices("q", cu_seqlens_q, len(q), max_seqlen_q)
    for rows, keys in zip(queries, _slices("k", cu_seqlens_k, len(k), max_seqlen_k), strict=True):
        if rows.start == rows.stop or keys.start == keys.stop:
            continue
        result = attention(
            q[None, rows], k[None, keys], v[None, keys], causal=causal, softmax_scale=softmax_scale, return_lse=lse
        )
        if lse:
            sums[:, rows] = result[1][0]
            result = result[0]
        o[rows] = result[0]
    return o, sums


@_packed.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    softmax_scale: float | None,
    lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(q, lse)


def _outputs(q: torch.Tensor, lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows = (q.shape[1], q.shape[0]) if lse else (0,)
    return q.new_empty(q.shape), q.new_empty(rows, dtype=torch.float32)


def _check(name: str, cu_seqlens: torch.Tensor, device: torch.device) -> None:
    """What is known of it without reading it."""
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype != torch.int32:
        raise UnsupportedProblemError(
            f"{name} is {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}; it should be (sequences + 1,) torch.int32"
        )
    if cu_seqlens.device != device:
        raise UnsupportedProblemError(f"{name} is on {cu_seqlens.device}, q on {device}; they should be on one device")


def _slices(of: str, cu_seqlens: torch.Tensor, total: int, max_seqlen: int) -> list[slice]:
    """The rows of each sequence, which are within the tensor."""
    name, bounds = f"cu_seqlens_{of}", cu_seqlens.tolist()
    if bounds[0] != 0:
        raise UnsupportedProblemError(f"{name} begins with {bounds[0]}; it should begin with 0")
    for index, (begin, end) in enumerate(itertools.pairwise(bounds)):
        if end < begin:
            raise UnsupportedProblemError(
                f"{name}[{index + 1}] is {end}, after {begin}; each should be at least the one before"
            )
        if end - begin > max_seqlen:
            raise UnsupportedProblemError(
                f"max_seqlen_{of} is {max_seqlen}; sequence {index} of {name} has {end - begin} rows"
            )
    if bounds[-1] > total:
        raise UnsupportedProblemError(f"{name} ends with {bounds[-1]}; {of} has {total} rows")
    return list(itertools.starmap(slice, itertools.pairwise(bounds)))
