"""Attention as a function of torch tensors, for models: a rung that takes any attention behind one call."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flashladder.common.api import differentiable, expressions, operator, validate
from flashladder.common.api.options import options_of
from flashladder.common.api.validate import BATCH, OPEN, Window
from flashladder.common.catalog import FASTEST
from flashladder.common.errors import UnsupportedProblemError


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    window: Window = OPEN,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    mask: str | None = None,
    score: str | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
    deterministic: bool = False,
    version: str = FASTEST,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(softmax_scale * Q K^T) V, as the rung `version` computes it. Differentiable, but for expressions.

    q is (batch, seqlen_q, num_heads, head_dim), k (batch, seqlen_k, num_heads_k, head_dim) and v (batch, seqlen_k,
    num_heads_k, head_dim_v), of bf16 or fp16, with any strides; num_heads_k divides num_heads. A tensor is copied
    where its last stride is not 1, or another one or its address is no multiple of 16 bytes.
    head_dim is up to 512, and head_dim_v too. The tensors are copied, with zeros behind their columns, where one of
    both is no multiple of 8, where head_dim_v is larger, and where it is smaller and dropout is wanted. There are
    gradients up to 256 columns. On Hopper they need no other copies; elsewhere both are filled up to 64, 96, 128 or
    256 columns. A causal mask is aligned to the bottom right. softmax_scale defaults to 1 / sqrt(head_dim). Returns O,
    (batch, seqlen_q, num_heads, head_dim_v), and with `return_lse` also the log-sum-exp
    of each row of scores, (batch, num_heads, seqlen_q), fp32, in natural logarithms. A row that sees no key has O = 0
    and a log-sum-exp of -inf. There may be no sequences, rows, keys or heads. Under torch.autocast q, k and v are cast
    to its type where one of them is of fp32.

    A `window` of (left, right) hides keys that are further from a row's own, which is the last that a causal mask shows
    it, whatever `right` is; None: all. With a `softcap`, scores are softcap * tanh(score / softcap), softcap up to
    1000; 0 is none. A hidden key weighs 0; if its V is NaN or inf, it spoils rows near it all the same, as in
    flash-attn. With `alibi_slopes`, (num_heads,) or (batch, num_heads), fp32 and finite, a score then loses
    slope * |i + seqlen_k - seqlen_q - j|.

    With a `dropout_p`, each weight of P is dropped with that probability, rounded to 1/256, and at least 1/256 and at
    most 255/256. The others are multiplied by 1 / (1 - p) for the p so rounded, so that the mean of O is O without
    dropout. flash-attn and torch multiply by that of the p asked for: with p up to 0.5 this differs by up to 0.4 %, by
    0.23 % at 0.17. The log-sum-exp is that of all weights. Which are dropped is drawn from torch's generator of the
    device; `dropout_mask` gives it.

    With `sinks`, (num_heads,), fp32, bf16 or fp16, exp(sink) joins the sum of each row, as if of a key whose V is 0. A
    row that sees no key still has O = 0; its log-sum-exp is the sink. Sinks are at most 2.3e38 in magnitude, or
    infinite: of a larger one on a GPU, at which nobody looks, the log-sum-exp is infinite, and O is right.

    A `mask` is an expression in C that says which keys a row sees, of those that it sees else, and a `score` one that
    says what a score becomes: mask="k <= q || image[q] == image[k]", score="s + slope[h] * (k - q)". They name b, h, q
    and k, an element's sequence, head of q and positions; s, its score with softmax_scale and all else above; seqlen_q
    and seqlen_k; and `tensors` by their names, with an index for each dimension. docs/masks.md has the language.
    Positions count from the start of the sequence, whose last rows q has: its first row is at seqlen_k - seqlen_q, so
    that "k <= q" is the causal mask. An expression is compiled for all lengths, and for tensors of all shapes. A row
    whose keys are all hidden has O = 0. What a `score` gives is at most 2.3e38 in magnitude, or -inf: a larger one
    becomes infinite, and hides its key or makes its row NaN.

    O is written to `out` if it is given: a tensor of its shape, in memory of its own. Its strides are multiples of 16
    bytes, the last is 1. A call takes longer where that interleaves with an input's.

    The first call for a dtype, head_dim, number of heads and mask makes a kernel ready, one with the log-sum-exp and
    one without, which all lengths share. It says so where it must compile it, which takes seconds. Kernels are launched
    on the current stream, from any thread; after a first call a CUDA graph may capture them. Tensors on the CPU go
    through the emulator, which takes seconds for some hundred rows. Works under torch.compile.

    Where q, k, v, sinks or a tensor that a `score` reads want a gradient, O and the log-sum-exp have one: a rung of the
    ladder versions/backward computes dQ, dK and dV. It takes no `out`; alibi_slopes have no gradient, and gradients
    have none. A row that sees no key adds nothing to them by its dO. With `deterministic`, and under
    torch.use_deterministic_algorithms(True), each run gives them the same bits, which O always has; those of tensors
    that a score reads are refused then.

    Raises UnsupportedProblemError for an argument of another type, tensors that the rung does not take, a gradient that
    is wanted and no rung computes, dropout or an expression in more sequences or heads than the 65,535 that a launch
    may have, and an `out` that shares memory with an input; ExpressionError, which is one too, for a mask or a score
    that is none or that leaves a tensor; ConfigError for an unknown version.
    """
    is_open = type(window) is tuple and window == OPEN
    is_plain = type(softcap) in (float, int) and type(dropout_p) in (float, int) and not softcap and not dropout_p
    has_mods = mask is not None or score is not None or tensors is not None
    if is_open and not has_mods and alibi_slopes is None and sinks is None and is_plain and (cpp := operator.in_cpp()):
        asked = causal, softmax_scale, version, return_lse, deterministic
        done = cpp.straight(operator.onlookers, operator.plain, q, k, v, out, *asked, differentiable.attaching())
        if done is not None:
            return done
    q, k, v = validate.inputs(BATCH, q, k, v)
    return_lse = validate.flag("return_lse", return_lse)
    if out is not None and validate.tensor("out", out).requires_grad and torch.is_grad_enabled():
        raise UnsupportedProblemError("out wants a gradient, and kernels compute none: call it in torch.no_grad()")
    options = options_of(
        q.device,
        q.shape[0],
        q.shape[2],
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
    if has_mods:
        options = expressions.options_with(options, mask, score, tensors, q, k)
    o, lse = differentiable.attend(q, k, v, options, return_lse, out)
    return (o, lse) if return_lse else o
