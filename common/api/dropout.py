"""attention with dropout. Where the weights are that it drops is drawn from torch's generator of the tensors' device.

The state is drawn as a tensor, outside of the operator: so CUDA graphs, torch.compile and activation checkpointing do
with it as with any random number of torch.
"""

from __future__ import annotations

from typing import Any

import torch

from flashladder.common.api import differentiable, given, gradients, op
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem import dropout
from flashladder.common.problem.config import listing
from flashladder.common.runtime import fast_path

op.LIBRARY.define(
    "attention_dropout(Tensor q, Tensor k, Tensor v, Tensor rng_state, bool causal, float? softmax_scale, "
    "float dropout_p, str version) -> (Tensor, Tensor)"
)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    dropout_p: float,
    version: str,
    **beside: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and the log-sum-exp, of which O has gradients. What is asked for `beside` dropout is refused by its name."""
    if unknown := listing(name for name, is_asked in beside.items() if is_asked):
        raise UnsupportedProblemError(f"dropout_p={dropout_p} with {unknown}: attention takes one or the other yet")
    _check(dropout_p)
    if gradients.wanted(q, k, v):
        options = differentiable.Options(causal=causal, softmax_scale=softmax_scale, dropout_p=dropout_p)
        differentiable.require_rung(q, k, options)
    state = dropout.drawn(q.device)
    o, lse = torch.ops.flashladder.attention_dropout(q, k, v, state, causal, softmax_scale, dropout_p, version)
    return o, lse


def dropout_mask(q: torch.Tensor, k: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Which weights of P a call of `attention` keeps: (batch, num_heads, seqlen_q, seqlen_k), for tests.

    q and k are those of the call. It draws from torch's generator as `attention` does: after the same
    torch.manual_seed it is that call's mask. UnsupportedProblemError for a dropout_p that is not in [0, 1).
    """
    given.tensors(q=q, k=k)
    dropout_p = given.number("dropout_p", dropout_p)
    _check(dropout_p)
    batch, seqlen_q, num_heads, _ = q.shape
    mask = dropout.kept(dropout.drawn(q.device), dropout_p, range(batch * num_heads), range(seqlen_q), k.shape[1])
    return mask.unflatten(0, (batch, num_heads))


def _check(dropout_p: float) -> None:
    if not 0 <= dropout_p < 1:
        raise UnsupportedProblemError(f"dropout_p={dropout_p}: must be at least 0 and less than 1")


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rng_state: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    dropout_p: float,
    version: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    problem = op.problem_of(q, k, causal, softmax_scale, True, dropout_p=dropout_p)
    o, lse = _outputs(q)
    tensors = {"q": q, "k": k, "v": v, dropout.RNG_STATE: rng_state, "o": o, "lse": lse}
    op.slow_path(op.prepared(problem, q, version), problem, tensors)
    return o, lse


def _outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), fast_path.new_lse(q)


for _device in ("CPU", "CUDA"):
    op.LIBRARY.impl("attention_dropout", _forward, _device)


@torch.library.register_fake("flashladder::attention_dropout", lib=op.LIBRARY)
def _(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(q)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, rng_state, causal, softmax_scale, dropout_p, _ = inputs
    asked = {"causal": causal, "softmax_scale": softmax_scale, "dropout_p": dropout_p, "rng_state": rng_state}
    differentiable.keep(ctx, (q, k, v), differentiable.Options(**asked), output)


torch.library.register_autograd(
    "flashladder::attention_dropout", differentiable.differentiate, setup_context=_keep, lib=op.LIBRARY
)
