"""Packed sequences: tokens of all sequences in one tensor, and where each sequence begins."""

from __future__ import annotations

import itertools
import math

import torch

from flashladder.common.attention.bounded import ALL, mask_of, refuse_gradients
from flashladder.common.attention.run import dtype_of, run
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem import Problem


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
    window: tuple[int, int] = ALL,
    softcap: float = 0.0,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`attention` within each of many sequences, in one launch; forward only.

    q is (total_q, num_heads, head_dim), k and v are (total_k, num_heads_k, head_dim). Sequence i has the rows
    cu_seqlens_q[i] to cu_seqlens_q[i + 1] of q, and likewise of k and v; both are (sequences + 1), int32, on q's
    device. A sequence may have no rows; none has more than max_seqlen_q and max_seqlen_k. Returns O, shaped as q, and
    with `return_lse` also the log-sum-exps, (num_heads, total_q), fp32. Rows that see no key have O = 0 and a
    log-sum-exp of -inf. `window` and `softcap` are those of `bounded_attention`.

    Nothing is read on the host for it, so nothing waits for the GPU. The kernel reads nothing outside the tensors,
    whatever cu_seqlens say. Rows of no sequence, and those behind max_seqlen_q of theirs, are not written.
    `check_sequences` says whether there are such; on the CPU it is always asked.

    Raises UnsupportedProblemError for cu_seqlens that cannot be of these tensors, and as `bounded_attention` does.
    """
    refuse_gradients(q, k, v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 3:
            raise UnsupportedProblemError(
                f"{name} has shape {tuple(tensor.shape)}; packed, it is (total, heads, head_dim)"
            )
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check_starts(name, cu_seqlens, q.device)
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise UnsupportedProblemError(
            f"cu_seqlens_q is of {len(cu_seqlens_q) - 1} sequences, cu_seqlens_k of {len(cu_seqlens_k) - 1}"
        )
    mask = mask_of(causal, window, max_seqlen_q, max_seqlen_k)
    o, lse = _packed(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *mask, softcap, softmax_scale, return_lse
    )
    return (o, lse) if return_lse else o


def check_sequences(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    total_q: int,
    total_k: int,
) -> None:
    """Reads both on the host, which waits for the GPU. UnsupportedProblemError unless they part all rows."""
    _check_lengths("q", cu_seqlens_q, max_seqlen_q, total_q)
    _check_lengths("k", cu_seqlens_k, max_seqlen_k, total_k)


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
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    softmax_scale: float | None,
    lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and the log-sum-exp; the latter has no elements unless it is asked for."""
    outputs = o, sums = _outputs(q, lse)
    if not cu_seqlens_q.is_cuda:
        check_sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, len(q), len(k))
    if not len(q) or not len(k):  # kernels take no tensors without elements
        o.zero_()
        sums.fill_(-math.inf)
        return outputs
    problem = Problem(
        operation="packed",
        batch=len(cu_seqlens_q) - 1,
        num_heads=q.shape[1],
        num_heads_k=k.shape[1],
        seqlen_q=max(1, max_seqlen_q),
        seqlen_k=max(1, max_seqlen_k),
        total_q=len(q),
        total_k=len(k),
        head_dim=q.shape[2],
        dtype=dtype_of(q),
        causal=causal,
        softmax_scale=softmax_scale,  # type: ignore[arg-type]  # None: the default
        lse=lse,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
    )
    starts = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    run(problem, {"q": q[None], "k": k[None], "v": v[None], **starts}, {"o": o[None], **({"lse": sums} if lse else {})})
    return outputs


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
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    softmax_scale: float | None,
    lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(q, lse)


def _outputs(q: torch.Tensor, lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows = (q.shape[1], q.shape[0]) if lse else (0,)
    return q.new_empty(q.shape), q.new_empty(rows, dtype=torch.float32)


def _check_starts(name: str, cu_seqlens: torch.Tensor, device: torch.device) -> None:
    """What is known of it without reading it."""
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype != torch.int32:
        raise UnsupportedProblemError(
            f"{name} is {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}; it should be (sequences + 1,) torch.int32"
        )
    if cu_seqlens.device != device:
        raise UnsupportedProblemError(f"{name} is on {cu_seqlens.device}, q on {device}; they should be on one device")


def _check_lengths(of: str, cu_seqlens: torch.Tensor, max_seqlen: int, total: int) -> None:
    """That the sequences are within the tensor, and none is longer than said."""
    name, starts = f"cu_seqlens_{of}", cu_seqlens.tolist()
    if starts[0] != 0 or starts[-1] != total:
        raise UnsupportedProblemError(
            f"{name} is from {starts[0]} to {starts[-1]}; it should be from 0 to {total}, the rows of {of}"
        )
    for index, (begin, end) in enumerate(itertools.pairwise(starts)):
        if not begin <= end:
            raise UnsupportedProblemError(
                f"{name}[{index + 1}] is {end}, after {begin}; each should be at least the one before"
            )
        if end - begin > max_seqlen:
            raise UnsupportedProblemError(
                f"max_seqlen_{of} is {max_seqlen}; sequence {index} of {name} has {end - begin} rows"
            )
