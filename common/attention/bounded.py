"""Attention with a sliding window or a softcap."""

from __future__ import annotations

import torch

from flashladder.common.attention.run import dtype_of, run
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem import Problem

ALL = (-1, -1)  # a window that hides no key


def bounded_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: tuple[int, int] = ALL,
    softcap: float = 0.0,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`attention` with a sliding window or a softcap, or with both; tensors and results are the same.

    `window` is flash-attn's window_size, (left, right): row i of q sees the keys from i + seqlen_k - seqlen_q - left to
    i + seqlen_k - seqlen_q + right, -1 stands for all. With `causal` right is 0. With `softcap` scores are
    softcap * tanh(softmax_scale * q k / softcap).

    Raises UnsupportedProblemError for bounds that are none, for tensors that want a gradient, and as `attention` does.
    """
    refuse_gradients(q, k, v)
    for name, tensor in (("q", q), ("k", k)):
        if tensor.dim() != 4:
            shape = tuple(tensor.shape)
            raise UnsupportedProblemError(f"{name} has shape {shape}; it should be (batch, seqlen, heads, head_dim)")
    mask = mask_of(causal, window, q.shape[1], k.shape[1])
    o, lse = _bounded(q, k, v, *mask, softcap, softmax_scale, return_lse)
    return (o, lse) if return_lse else o


@torch.library.custom_op("flashladder::bounded_attention", mutates_args=())
def _bounded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    softmax_scale: float | None,
    lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and the log-sum-exp; the latter has no elements unless it is asked for."""
    batch, seqlen_q, num_heads, head_dim = q.shape
    problem = Problem(
        batch=batch,
        num_heads=num_heads,
        num_heads_k=k.shape[2],
        seqlen_q=seqlen_q,
        seqlen_k=k.shape[1],
        head_dim=head_dim,
        dtype=dtype_of(q),
        causal=causal,
        softmax_scale=softmax_scale,  # type: ignore[arg-type]  # None: the default
        lse=lse,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
    )
    outputs = _outputs(q, lse)
    run(problem, {"q": q, "k": k, "v": v}, dict(zip(problem.outputs, outputs, strict=False)))
    return outputs


@_bounded.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    softmax_scale: float | None,
    lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(q, lse)


def _outputs(q: torch.Tensor, lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    batch, seqlen_q, num_heads, _ = q.shape
    rows = (batch, num_heads, seqlen_q) if lse else (0,)
    return q.new_empty(q.shape), q.new_empty(rows, dtype=torch.float32)


def mask_of(causal: bool, window: tuple[int, int], seqlen_q: int, seqlen_k: int) -> tuple[bool, int | None, int | None]:
    """Whether a mask is causal, and a window's ends, None for those that hide no key: as a problem has them.

    UnsupportedProblemError for a window that is none.
    """
    left, right = window
    if left < -1 or right < -1:
        raise UnsupportedProblemError(f"window={tuple(window)}: (left, right), each at least 0, or -1 for all keys")
    right = 0 if causal else right
    hides_left, hides_right = -1 < left < seqlen_k - 1, -1 < right < seqlen_q - 1
    is_causal = hides_right and right == 0
    return is_causal, left if hides_left else None, right if hides_right and not is_causal else None


def refuse_gradients(*tensors: torch.Tensor) -> None:
    """UnsupportedProblemError for inputs that want one."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise UnsupportedProblemError(
            "the inputs want a gradient, and kernels compute none: call it in torch.no_grad()"
        )
