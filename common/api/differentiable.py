"""Attention that torch differentiates: the gradients are those of a rung of the backward ladder.

The forward pass keeps Q, K, V, O, the log-sum-exp, and what was asked for. The backward pass is an operator of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from flashladder.common.api import backward, gradients, operator, padding, pieces
from flashladder.common.api.operator import LIBRARY, are_observed
from flashladder.common.api.options import Modified, Options
from flashladder.common.catalog import Widths
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.runtime import fast_path
from flashladder.common.runtime.ready import check_apart, check_out, widths_for

_Gradients = tuple[Any, ...]  # each a tensor or None; of what expressions read a list of such
_INPUTS = ("q", "k", "v")
_READ = "read"
_PLAIN = (*_INPUTS, "causal", "softmax_scale", "version", "lse")  # what operators take, by name
_GENERAL, _MODIFIED = (
    (*_INPUTS, *(field.name for field in dataclasses.fields(kind)), "lse") for kind in (Options, Modified)
)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, lse: bool, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """O, which is `out` if that is given, and the log-sum-exp, if `lse` asks for it; with gradients if they are wanted.

    What no kernel takes is padded with columns of zeros, in copies.
    """
    trains = gradients.needed(q, k, v, *options.trained)
    if trains and out is not None:
        raise UnsupportedProblemError(
            "the inputs want a gradient, and backward rungs take no out: leave it out, or call it in torch.no_grad()"
        )
    inputs, head_dim_v = (q, k, v), v.shape[3]
    trained = trained_widths(q, isinstance(options, Modified)) if trains else None
    wanted = padding.columns(q.shape[3], head_dim_v, options.dropout_p > 0, trained)
    if is_padded := wanted != (q.shape[3], head_dim_v):
        q, k, v, options = padding.padded(q, k, v, options, wanted)
    if trains:
        o, sums = _attend(q, k, v, options)
    else:
        o, sums = operator.attend(q, k, v, options, lse, None if is_padded or not options.is_plain else out)
    if is_padded:
        o = o[..., :head_dim_v]
    if out is not None and o is not out:
        check_out(out, q, head_dim_v)
        check_apart(out, dict(zip(_INPUTS, inputs, strict=True)))
        o = out.copy_(o)
    return o, sums


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """O and the log-sum-exp, which both have gradients. UnsupportedProblemError for what no backward rung takes."""
    gradients.refuse_transforms()
    require_rung(q, k, v, options)
    if not are_observed(q, k, v):
        read = options.read if isinstance(options, Modified) else ()
        o, lse = _Direct.apply(q, k, v, options.sinks, options, None, *read)
        operator.allow_gradients(q, k, options, backward.are_same_bits(options.deterministic))
    elif options.is_plain and not options.deterministic:
        o, lse = operator.attend(q, k, v, options, True)
    else:
        o, lse = operator.operator_of(options)(q, k, v, *options.flat(), True)
    return o, lse


def trained_widths(q: torch.Tensor, mods: bool = False) -> Widths:
    """What the tensors of a call, perhaps beside expressions, may have where gradients are wanted of it."""
    return widths_for(backward.OPERATION, q.device, mods)


def require_rung(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, columns: tuple[int, int] | None = None
) -> None:
    """UnsupportedProblemError where no backward rung takes what a forward pass is to have gradients of.

    `columns` are those of q and v that the tensors are then padded to.
    """
    if not torch.compiler.is_compiling() and not q.is_meta:
        if isinstance(options, Modified):
            options = options.asking(x.requires_grad for x in options.read)
        problem = backward.problem_of(q, k, v, options)
        if columns:
            problem = dataclasses.replace(problem, head_dim=columns[0], head_dim_v=columns[1])
        pieces.require_one_launch(problem)
        backward.require(problem, q.device)


def _keep_plain(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    given = dict(zip(_PLAIN, inputs, strict=True))
    keep(ctx, _PLAIN, inputs[:3], Options(causal=given["causal"], softmax_scale=given["softmax_scale"]), output)


def _keep_general(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    keep(ctx, _GENERAL, inputs[:3], Options(*inputs[3:-1]), output)


def _keep_modified(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    keep(ctx, _MODIFIED, inputs[:3], Modified(*inputs[3:-1]), output)


def keep(
    ctx: Any,
    names: tuple[str, ...],
    inputs: tuple[torch.Tensor, ...],
    options: Options,
    output: tuple[torch.Tensor, ...],
) -> None:
    """Q, K, V, O, the log-sum-exp, and what was asked for, for `differentiate`; `names` are those of all inputs."""
    if output[0].numel() and not output[1].numel():
        raise UnsupportedProblemError(
            "the inputs want a gradient, which torch.vmap hid: call it with return_lse=True, or without vmap"
        )
    held = options.held
    ctx.save_for_backward(*inputs, *output, *held)
    ctx.names = names
    ctx.options = options.holding((None,) * len(held)) if any(x is not None for x in held) else options
    ctx.set_materialize_grads(False)


def differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> _Gradients:
    """The gradients of all inputs; of what expressions read in a list."""
    return _differentiate(ctx, ctx.needs_input_grad, dout, dlse)


def _differentiate(
    ctx: Any, needs: tuple[Any, ...], dout: torch.Tensor | None, dlse: torch.Tensor | None
) -> _Gradients:
    wanted = dict(zip(ctx.names, needs, strict=True))
    wants_read: list[bool] = list(wanted.pop(_READ, ()))
    found: dict[str, Any] = dict.fromkeys(ctx.names)
    if _READ in found:
        found[_READ] = [None] * len(wants_read)
    if dout is None and dlse is None:
        return tuple(found.values())
    q, k, v, o, lse, *held = ctx.saved_tensors
    dout = torch.zeros_like(o) if dout is None else dout
    options = ctx.options
    if any(x is not None for x in held):
        options = options.holding(held)
    if wants_read:
        options = options.asking(wants_read)
        wants_read = options.asked
    asked = wanted["q"], wanted["k"] or wanted["v"], wanted.get("sinks", False)
    if any(asked) or any(wants_read):
        computed = backward.compute_gradients(dout, q, k, v, o, lse, dlse, options, *asked)
        found |= {name: x for name, x in zip(backward.TRAINED, computed, strict=False) if wanted.get(name)}
        if wants_read:
            found[_READ] = [x if is_wanted else None for x, is_wanted in zip(computed[-1], wants_read, strict=True)]
    return tuple(found.values())


class _Direct(torch.autograd.Function):
    """Both operators and their gradients where nobody looks on: torch takes less time of the host to this."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        options: Options,
        computed: tuple[torch.Tensor, torch.Tensor] | None,
        *read: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output = computed or operator.attend_here(q, k, v, options, True)
        keep(ctx, (*_INPUTS, "sinks", "options", "computed", _READ), (q, k, v), options, output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        needs, count = ctx.needs_input_grad, len(ctx.names) - 1
        found = _differentiate(ctx, (*needs[:count], needs[count:]), *gradients)
        return *found[:count], *found[count]


def attach(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    computed: tuple[torch.Tensor, torch.Tensor],
    causal: bool,
    softmax_scale: float | None,
    version: str,
    return_lse: bool,
    deterministic: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """What a plain call gives that wants gradients, and whose O and log-sum-exp fast_path.cpp has computed."""
    options, _ = backward.plain_settings(causal, softmax_scale, version, deterministic)
    output: tuple[torch.Tensor, torch.Tensor] = _Direct.apply(q, k, v, None, options, computed)
    return output if return_lse else output[0]


def attaching() -> Callable[..., Any]:
    """`attach`, in C++ where it is there."""
    return _attach_of(fast_path.node) if fast_path.node else attach


@lru_cache
def _attach_of(node: ModuleType) -> Callable[..., Any]:
    node.set_up(vars(backward), operator.onlookers, node.launched)
    attach_in_cpp: Callable[..., Any] = node.attach
    return attach_in_cpp


torch.library.register_autograd("flashladder::attention", differentiate, setup_context=_keep_plain, lib=LIBRARY)
operator.attention_general.register_autograd(differentiate, setup_context=_keep_general)
operator.attention_modified.register_autograd(differentiate, setup_context=_keep_modified)
