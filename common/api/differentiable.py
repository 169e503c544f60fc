"""Attention that torch differentiates: the gradients are those of a rung of the backward ladder.

The forward pass keeps Q, K, V, O, the log-sum-exp, and what was asked for. The backward pass is an operator of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from flashladder.common.api import documents, flops, gradients, operator, padding, pieces
from flashladder.common.api.operator import LIBRARY, are_observed
from flashladder.common.api.options import Modified, Options
from flashladder.common.catalog import Widths
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.problem import DETERMINISTIC, Problem
from flashladder.common.runtime import fast_path
from flashladder.common.runtime.launch import PROBLEMS_KEPT
from flashladder.common.runtime.ready import check_apart, check_out, choice_for, widths_for

OPERATION = "backward"

# The plans of problems that came often, as fast_path.cpp finds them.
planned: dict[bytes, tuple[Any, ...]] = {}

_Gradients = tuple[torch.Tensor | None, ...]
_INPUTS, _GRADIENTS = ("q", "k", "v"), ("dq", "dk", "dv")
_PLAIN = (*_INPUTS, "causal", "softmax_scale", "version", "lse")  # what operators take, by name
_GENERAL = (*_INPUTS, *(field.name for field in dataclasses.fields(Options)), "lse")

LIBRARY.define(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? dlse, "
    f"{Options.schema()}, bool wants_dq, bool wants_dkv) -> (Tensor, Tensor, Tensor)",
    tags=operator.STRIDES,
)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, lse: bool, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """O, which is `out` if that is given, and the log-sum-exp, if `lse` asks for it; with gradients if they are wanted.

    What no kernel takes is padded with columns of zeros, in copies.
    """
    trains = gradients.needed(q, k, v, options.sinks)
    if trains and out is not None:
        raise UnsupportedProblemError(
            "the inputs want a gradient, and backward rungs take no out: leave it out, or call it in torch.no_grad()"
        )
    if trains and isinstance(options, Modified):
        gradients.refuse(q, k, v, what="the inputs of attention with a mask or a score by an expression")
    inputs, head_dim_v = (q, k, v), v.shape[3]
    wanted = padding.columns(q.shape[3], head_dim_v, options.dropout_p > 0, trained_widths(q) if trains else None)
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
        o, lse = _Direct.apply(q, k, v, options.sinks, options, None)
        operator.allow_gradients(q, k, options, _are_same_bits(options.deterministic))
    elif options.is_plain and not options.deterministic:
        o, lse = operator.attend(q, k, v, options, True)
    else:
        o, lse = operator.attention_general(q, k, v, *options.flat(), True)
    return o, lse


def trained_widths(q: torch.Tensor) -> Widths:
    """What the tensors of a call may have where gradients are wanted of it."""
    return widths_for(OPERATION, q.device)


def require_rung(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, columns: tuple[int, int] | None = None
) -> None:
    """UnsupportedProblemError where no backward rung takes what a forward pass is to have gradients of.

    `columns` are those of q and v that the tensors are then padded to.
    """
    if not torch.compiler.is_compiling() and not q.is_meta:
        problem = problem_of(q, k, v, options)
        if columns:
            problem = dataclasses.replace(problem, head_dim=columns[0], head_dim_v=columns[1])
        pieces.require_one_launch(problem)
        _require(problem, q.device)


def problem_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, **asked: bool) -> Problem:
    """That of the backward pass, whose options are those that are `asked` for.

    Also torch's switch may ask for the same bits each time.
    """
    asked[DETERMINISTIC] = _are_same_bits(options.deterministic)
    others: dict[str, Any] = {"operation": OPERATION, "head_dim_v": v.shape[3], "lse": True}
    return options.problem(q, k, **others, options=tuple(asked.items()))


def _are_same_bits(deterministic: bool) -> bool:
    """Whether gradients are to have the same bits in each run: a call asks for them, or torch's switch for all calls;
    with warn_only it does not."""
    of_all = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return deterministic or of_all


def _require(problem: Problem, device: torch.device) -> None:
    """UnsupportedProblemError where no rung takes a problem, with what would work."""
    try:
        choice_for(problem, device)
    except UnsupportedProblemError as error:
        instead = "call it in torch.no_grad()"
        if problem.deterministic:
            instead += ", or without deterministic and with torch.use_deterministic_algorithms(True, warn_only=True)"
        raise UnsupportedProblemError(f"the inputs want a gradient, and {error}: {instead}") from None


def _keep_plain(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    given = dict(zip(_PLAIN, inputs, strict=True))
    keep(ctx, _PLAIN, inputs[:3], Options(causal=given["causal"], softmax_scale=given["softmax_scale"]), output)


def _keep_general(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    keep(ctx, _GENERAL, inputs[:3], Options(*inputs[3:-1]), output)


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
    tensors = options.tensors
    ctx.save_for_backward(*inputs, *output, *tensors.values())
    nothing: dict[str, Any] = dict.fromkeys(tensors)
    ctx.names, ctx.kept = names, tuple(tensors)
    ctx.options = dataclasses.replace(options, **nothing) if tensors else options
    ctx.set_materialize_grads(False)


def differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> _Gradients:
    """The gradients of all inputs."""
    wanted = dict(zip(ctx.names, ctx.needs_input_grad, strict=True))
    found: dict[str, torch.Tensor] = {}
    if dout is None and dlse is None:
        return (None,) * len(wanted)
    q, k, v, o, lse, *kept = ctx.saved_tensors
    dout = torch.zeros_like(o) if dout is None else dout
    options = ctx.options
    if kept:
        options = dataclasses.replace(options, **dict(zip(ctx.kept, kept, strict=True)))
    if any(wanted[name] for name in _INPUTS):
        asked = wanted["q"], wanted["k"] or wanted["v"]
        found |= zip(_INPUTS, compute_gradients(dout, q, k, v, o, lse, dlse, options, *asked), strict=True)
    if wanted.get("sinks"):
        found["sinks"] = _of_sinks(options, o, lse, dout, dlse)
    return tuple(found[name] if is_wanted else None for name, is_wanted in wanted.items())


def compute_gradients(*given: Any) -> tuple[torch.Tensor, ...]:
    """As `_compute`; by an operator where somebody looks on. node.cpp calls it too."""
    *tensors, options, wants_dq, wants_dkv = given
    if torch.is_grad_enabled() or are_observed(*tensors[:6]) or gradients.are_batched(tensors[0], tensors[6]):
        computed: tuple[torch.Tensor, ...] = torch.ops.flashladder.attention_backward(
            *tensors, *options.flat(), wants_dq, wants_dkv
        )
        return computed
    return _compute(*given)


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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output = computed or operator.attend_here(q, k, v, options, True)
        keep(ctx, (*_INPUTS, "sinks", "options", "computed"), (q, k, v), options, output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return differentiate(ctx, *gradients)


@lru_cache(PROBLEMS_KEPT, typed=True)
def plain_settings(
    causal: bool, softmax_scale: float | None, version: str, deterministic: bool
) -> tuple[Options, tuple[Any, ...]]:
    """The options of a plain call, and their numbers; for node.cpp too."""
    scale = None if softmax_scale is None else float(softmax_scale)
    options = Options(causal=causal, softmax_scale=scale, version=version, deterministic=deterministic)
    return options, options.numbers


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
    options, _ = plain_settings(causal, softmax_scale, version, deterministic)
    output: tuple[torch.Tensor, torch.Tensor] = _Direct.apply(q, k, v, None, options, computed)
    return output if return_lse else output[0]


def attaching() -> Callable[..., Any]:
    """`attach`, in C++ where it is there."""
    return _attach_of(fast_path.node) if fast_path.node else attach


@lru_cache
def _attach_of(node: ModuleType) -> Callable[..., Any]:
    node.set_up(globals(), operator.onlookers, node.launched)
    attach_in_cpp: Callable[..., Any] = node.attach
    return attach_in_cpp


def _of_sinks(
    options: Options, o: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None
) -> torch.Tensor:
    """(heads,): a sink takes the share exp(sink - LSE) of each row's weights; dLSE pulls it up, dO O pushes it down."""
    share = (options.tensors["sinks"][:, None] - lse).exp()
    pushed = (dout.float() * o).sum(-1).masked_fill((o == 0).all(-1), 0)  # of a row without keys, whose dO may be NaN
    pull = -pushed.transpose(1, 2).reshape(lse.shape)  # packed, lse has no batch
    pulled = (share * (pull if dlse is None else pull + dlse)).masked_fill(lse == -math.inf, 0)  # no key, and no sink
    if options.cu_seqlens_q is not None:
        row = torch.arange(lse.shape[-1], device=lse.device)
        pulled = pulled.masked_fill(row >= options.cu_seqlens_q[-1], 0)  # of no sequence; dO and dLSE may be NaN there
    return pulled.sum((-1,) if lse.dim() == 2 else (0, -1))


torch.library.register_autograd("flashladder::attention", differentiate, setup_context=_keep_plain, lib=LIBRARY)
operator.attention_general.register_autograd(differentiate, setup_context=_keep_general)


def _compute(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    options: Options,
    wants_dq: bool,
    wants_dkv: bool,
) -> tuple[torch.Tensor, ...]:
    """dQ, dK and dV, strided as Q, K and V are where the last of these is 1. Rows and keys of no sequence have zeros.

    One that is not wanted has no elements.
    """
    if options.documents is not None:
        padding, options = documents.taken_out(options, q)
        if padding is not None:
            return _compute_packed(padding, (dout, q, k, v, o), lse, dlse, options, wants_dq, wants_dkv)
    wanted = ((q, wants_dq), (k, wants_dkv), (v, wants_dkv))
    outputs = tuple([_gradient_like(tensor) if is_wanted else None for tensor, is_wanted in wanted])
    starts = options.cu_seqlens_q, options.cu_seqlens_k
    inputs = q, k, v, o, dout, lse, *starts, options.alibi_slopes, dlse, options.rng_state  # in the operation's order
    asked = *options.numbers, _are_same_bits(options.deterministic), wants_dq, wants_dkv
    cpp = operator.in_cpp()
    if not (cpp and cpp.launched(operator.onlookers, planned, inputs, asked, outputs)):
        problem = problem_of(q, k, v, options, dlse=dlse is not None, wants_dq=wants_dq, wants_dkv=wants_dkv)
        _require(problem, q.device)
        tensors = {"q": q, "k": k, "v": v, "o": o, "dout": dout, "lse": lse, "dlse": dlse}
        tensors |= {**options.tensors, **dict(zip(_GRADIENTS, outputs, strict=True))}
        found = operator.launch(problem, tensors, is_blind=options.is_blind(q, k))
        if found and not operator.clears(problem, found):
            operator.remember(planned, found.call, problem, inputs, asked)
    return tuple([q.new_empty(0) if x is None else x for x in outputs])


def _compute_packed(
    padding: documents.Padding,
    tensors: tuple[torch.Tensor, ...],
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    options: Options,
    *wanted: bool,
) -> tuple[torch.Tensor, ...]:
    """The same of dO, Q, K, V and O without padding. That has gradients of 0."""
    parts = padding.rows, padding.rows, padding.keys, padding.keys, padding.rows
    dout, q, k, v, o = (part.pack(x)[None] for part, x in zip(parts, tensors, strict=True))
    sums, dsums = (None if x is None else padding.rows.pack(x.mT).T.contiguous() for x in (lse, dlse))
    assert sums is not None
    found = _compute(dout, q, k, v, o, sums, dsums, options, *wanted)
    return tuple(
        part.unpack(gradient[0], _gradient_like(x)) if gradient.numel() else gradient
        for part, gradient, x in zip(parts[1:4], found, tensors[1:4], strict=True)
    )


def _gradient_like(tensor: torch.Tensor) -> torch.Tensor:
    """Room for its gradient, strided as it is where kernels can write to that."""
    if tensor.stride(-1) == 1:
        return torch.empty_like(tensor)
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _attention_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    dout, q, k, v, o, lse, dlse, *options, wants_dq, wants_dkv = arguments
    return _compute(dout, q, k, v, o, lse, dlse, Options(*options), wants_dq, wants_dkv)


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("attention_backward", _attention_backward, _device)


@torch.library.register_fake("flashladder::attention_backward", lib=LIBRARY)
def _(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any) -> tuple[torch.Tensor, ...]:
    wants_dq, wants_dkv = more[-2:]
    wanted = ((q, wants_dq), (k, wants_dkv), (v, wants_dkv))
    return tuple(_gradient_like(tensor) if is_wanted else q.new_empty(0) for tensor, is_wanted in wanted)


@flops.formula("attention_backward")
def _(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any) -> int:
    _, _, _, *options, _, _ = more
    return 2 * operator.pairs(q, k, Options(*options)) * (3 * q.shape[3] + 2 * v.shape[3])


def _refuse_again(ctx: Any, *_: Any) -> _Gradients:
    raise UnsupportedProblemError(
        "a gradient of a gradient is wanted (double backward), and no rung computes it: scaled_dot_product_attention "
        "with torch's math backend does"
    )


torch.library.register_autograd("flashladder::attention_backward", _refuse_again, lib=LIBRARY)
