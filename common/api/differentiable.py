"""attention that torch differentiates: the gradients are those of a rung of the backward ladder.

The forward pass keeps Q, K, V, O and the log-sum-exp. The backward pass is an operator of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch

from flashladder.common import catalog
from flashladder.common.api import op
from flashladder.common.catalog import Version
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.config import listing
from flashladder.common.problem.dropout import RNG_STATE
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import target
from flashladder.common.runtime.launch import ALIGNMENT, PROBLEMS_KEPT
from flashladder.common.runtime.tuned import is_long

LADDER = "backward"  # the name of the ladder, and of what it computes

_Gradients = tuple[torch.Tensor | None, ...]

op.LIBRARY.define(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, bool causal, "
    "float? softmax_scale, float dropout_p=0.0, Tensor? rng_state=None) -> (Tensor, Tensor, Tensor)"
)


def refuse(**asked: Any) -> None:
    """UnsupportedProblemError that names arguments of which no backward rung knows, where they are asked for."""
    if unknown := listing(name for name, is_asked in asked.items() if is_asked):
        raise UnsupportedProblemError(
            f"the inputs want a gradient, and backward rungs take no {unknown}: leave it out, or call it in "
            "torch.no_grad()"
        )


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, softmax_scale: float | None, version: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and the log-sum-exp, of which O has gradients. UnsupportedProblemError for what no backward rung takes."""
    require_rung(q, k, causal, softmax_scale)
    o, lse = torch.ops.flashladder.attention(q, k, v, causal, softmax_scale, version, True)
    return o, lse


def require_rung(
    q: torch.Tensor, k: torch.Tensor, causal: bool, softmax_scale: float | None, dropout_p: float = 0.0
) -> None:
    """UnsupportedProblemError where no backward rung takes what a forward pass is to have gradients of."""
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        raise UnsupportedProblemError(
            "the inputs want a gradient, and backward rungs sum dQ in any order, which "
            "torch.use_deterministic_algorithms forbids: with warn_only=True it works"
        )
    if not torch.compiler.is_compiling() and not q.is_meta:
        problem = op.problem_of(q, k, causal, softmax_scale, True, operation=LADDER, dropout_p=dropout_p)
        rung_for(problem, _arch(q.device))


@lru_cache(PROBLEMS_KEPT)
def rung_for(problem: Problem, arch: str) -> Version:
    """The highest backward rung that takes a problem; UnsupportedProblemError says what the lowest one lacks."""
    rungs = [rung for rung in catalog.versions(ladder=LADDER) if rung.runs_on(arch) and not rung.draft]
    if able := [rung for rung in rungs if rung.takes(problem)]:
        return able[-1]
    try:
        rungs[0].config_for(problem)
    except UnsupportedProblemError as error:
        reason = f"the inputs want a gradient, and {error}: call it in torch.no_grad()"
        raise UnsupportedProblemError(reason) from None
    raise UnsupportedProblemError(f"the inputs want a gradient, and no backward rung takes {problem.name}")


@cache
def _arch(device: torch.device) -> str:
    """What kernels are compiled for where tensors lie."""
    if device.type != "cuda":
        return target.resolve("emulator", None).arch
    with torch.cuda.device(device):
        return target.resolve("gpu", None).arch


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, causal, softmax_scale, *_ = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.options = causal, softmax_scale
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> _Gradients:
    return gradients_of(ctx, dout, dlse, ctx.saved_tensors, *ctx.options)


def gradients_of(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, saved: Sequence[torch.Tensor], *options: Any
) -> _Gradients:
    """Those of all inputs of an operator that begin with Q, K and V, of which Q, K, V, O and LSE are saved."""
    if dlse is not None:
        raise UnsupportedProblemError("a gradient of the log-sum-exp is wanted: backward rungs take that of O alone")
    nothing = (None,) * (len(ctx.needs_input_grad) - 3)
    if dout is None:
        return None, None, None, *nothing
    made = torch.ops.flashladder.attention_backward(dout, *saved, *options)
    asked = ctx.needs_input_grad[:3]
    return *(gradient if wanted else None for gradient, wanted in zip(made, asked, strict=True)), *nothing


torch.library.register_autograd("flashladder::attention", _differentiate, setup_context=_keep, lib=op.LIBRARY)


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """dQ, dK and dV, contiguous."""
    problem = op.problem_of(q, k, causal, softmax_scale, True, operation=LADDER, dropout_p=dropout_p)
    rung = rung_for(problem, _arch(q.device))
    kind = (LADDER, rung.name, q.dtype, q.device, *q.shape[2:], k.shape[2], causal, dropout_p > 0, is_long(problem))
    ready = op.ready_for(kind, problem, q, rung.name)
    given = {"q": q, "k": k, "v": v, "o": o, "dout": _as_kernels_read(dout), "lse": lse}
    if rng_state is not None:
        given[RNG_STATE] = rng_state
    made = {f"d{name}": tensor.new_empty(tensor.shape) for name, tensor in (("q", q), ("k", k), ("v", v))}
    op.slow_path(ready, problem, given | made)
    return tuple(made.values())


def _as_kernels_read(dout: torch.Tensor) -> torch.Tensor:
    """dO, copied where its strides are not those of a kernel's input: o.sum() gives one with no strides at all."""
    elements = ALIGNMENT // dout.element_size()
    *steps, last = dout.stride()
    is_plain = last == 1 and not any(step % elements for step in steps) and dout.data_ptr() % ALIGNMENT == 0
    return dout if is_plain else dout.contiguous()


for _device in ("CPU", "CUDA"):
    op.LIBRARY.impl("attention_backward", _backward, _device)


@torch.library.register_fake("flashladder::attention_backward", lib=op.LIBRARY)
def _(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in (q, k, v))


def _refuse_again(ctx: Any, *_: Any) -> _Gradients:
    raise UnsupportedProblemError(
        "a gradient of a gradient is wanted (double backward), and no rung computes it: scaled_dot_product_attention "
        "with torch's math backend does"
    )


torch.library.register_autograd("flashladder::attention_backward", _refuse_again, lib=op.LIBRARY)
