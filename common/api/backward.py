"""The backward pass as operators of torch, which a rung of the backward ladder computes."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import torch

from flashladder.common.api import beside, documents, flops, gradients, operator
from flashladder.common.api.operator import LIBRARY, are_observed
from flashladder.common.api.options import Modified, Options
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.problem import DETERMINISTIC, Problem
from flashladder.common.runtime.launch import PROBLEMS_KEPT
from flashladder.common.runtime.ready import choice_for

OPERATION = "backward"
TRAINED = ("q", "k", "v", "sinks")  # in the order of their gradients

# The plans of problems that came often, as fast_path.cpp finds them.
planned: dict[bytes, tuple[Any, ...]] = {}

for _name, _schema, _more in (
    ("attention_backward", Options.schema(), ""),
    ("attention_modified_backward", Modified.schema(), ", Tensor[]"),  # of the tensors that are read
):
    LIBRARY.define(
        f"{_name}(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? dlse, "
        f"{_schema}, bool wants_dq, bool wants_dkv, bool wants_dsinks) -> (Tensor, Tensor, Tensor, Tensor{_more})",
        tags=operator.STRIDES,
    )


def problem_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, **asked: bool) -> Problem:
    """That of the backward pass, whose options are those that are `asked` for.

    Also torch's switch may ask for the same bits each time.
    """
    asked[DETERMINISTIC] = are_same_bits(options.deterministic)
    others: dict[str, Any] = {"operation": OPERATION, "head_dim_v": v.shape[3], "lse": True}
    return options.problem(q, k, **others, options=tuple(asked.items()))


def are_same_bits(deterministic: bool) -> bool:
    """Whether gradients are to have the same bits in each run: a call asks for them, or torch's switch for all calls;
    with warn_only it does not."""
    of_all = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return deterministic or of_all


def require(problem: Problem, device: torch.device) -> None:
    """UnsupportedProblemError where no rung takes a problem, with what would work."""
    try:
        choice_for(problem, device)
    except UnsupportedProblemError as error:
        instead = "call it in torch.no_grad()"
        if problem.deterministic:
            instead += ", or without deterministic and with torch.use_deterministic_algorithms(True, warn_only=True)"
        raise UnsupportedProblemError(f"the inputs want a gradient, and {error}: {instead}") from None


@lru_cache(PROBLEMS_KEPT, typed=True)
def plain_settings(
    causal: bool, softmax_scale: float | None, version: str, deterministic: bool
) -> tuple[Options, tuple[Any, ...]]:
    """The options of a plain call, and their numbers; for node.cpp too."""
    scale = None if softmax_scale is None else float(softmax_scale)
    options = Options(causal=causal, softmax_scale=scale, version=version, deterministic=deterministic)
    return options, options.numbers


def compute_gradients(*given: Any) -> tuple[Any, ...]:
    """As `_compute`; by an operator where somebody looks on. node.cpp calls it too."""
    *tensors, options, wants_dq, wants_dkv, wants_dsinks = given
    if torch.is_grad_enabled() or are_observed(*tensors[:6]) or gradients.are_batched(tensors[0], tensors[6]):
        named = torch.ops.flashladder
        by = named.attention_modified_backward if isinstance(options, Modified) else named.attention_backward
        computed: tuple[Any, ...] = by(*tensors, *options.flat(), wants_dq, wants_dkv, wants_dsinks)
        return computed
    return _compute(*given)


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
    wants_dsinks: bool,
) -> tuple[Any, ...]:
    """dQ, dK and dV, strided as Q, K and V are where the last of these is 1, and the gradient of sinks, (heads,) fp32.
    With expressions, behind them those of the tensors that are read, in a list.

    Rows and keys of no sequence have zeros. One that is not wanted has no elements.
    """
    launches = _launches(options, wants_dq, wants_dkv)
    if launches and options.documents is not None:
        padding, options = documents.taken_out(options, q)
        if padding is not None:
            return _compute_packed(padding, (dout, q, k, v, o), lse, dlse, options, wants_dq, wants_dkv, wants_dsinks)
    wanted = ((q, wants_dq), (k, wants_dkv), (v, wants_dkv))
    outputs = [_gradient_like(tensor) if is_wanted else None for tensor, is_wanted in wanted]
    sums = beside.no_sums(options) if isinstance(options, Modified) else {}
    pulls = None
    if wants_dsinks and launches and q.numel() and k.numel() and not options.is_blind(q, k):
        pulls = torch.empty_like(lse, memory_format=torch.contiguous_format)  # what each row adds
    if launches:
        _launch(dout, q, k, v, o, lse, dlse, options, outputs, pulls, sums)
    dsinks = None
    if pulls is not None:
        dsinks = beside.summed(pulls)
    elif wants_dsinks:
        dsinks = beside.of_sinks(options, o, lse, dout, dlse)
    computed = tuple([q.new_empty(0) if x is None else x for x in (*outputs, dsinks)])
    return (*computed, beside.of_read(options, sums)) if isinstance(options, Modified) else computed


def _launches(options: Options, wants_dq: bool, wants_dkv: bool) -> bool:
    """Whether kernels run: not where sinks alone want a gradient."""
    return wants_dq or wants_dkv or (isinstance(options, Modified) and any(options.asked))


def _launch(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    options: Options,
    gradients: list[torch.Tensor | None],
    pulls: torch.Tensor | None,
    sums: dict[str, torch.Tensor],
) -> None:
    """Has kernels write the gradients of Q, K and V, what rows add to that of sinks, and sums of what is read."""
    wants_dq, wants_dkv = gradients[0] is not None, gradients[1] is not None
    outputs = (*gradients,) if pulls is None else (*gradients, pulls)
    sinks = None if pulls is None else options.sinks
    starts = options.cu_seqlens_q, options.cu_seqlens_k
    # In the operation's order
    inputs = q, k, v, o, dout, lse, *starts, options.alibi_slopes, dlse, sinks, options.rng_state
    asked = *options.numbers, are_same_bits(options.deterministic), wants_dq, wants_dkv
    cpp = None if isinstance(options, Modified) else operator.in_cpp()
    if not (cpp and cpp.launched(operator.onlookers, planned, inputs, asked, outputs)):
        of_pass = {"dlse": dlse is not None, "dsinks": pulls is not None, "wants_dq": wants_dq, "wants_dkv": wants_dkv}
        problem = problem_of(q, k, v, options, **of_pass)
        require(problem, q.device)
        tensors = {"q": q, "k": k, "v": v, "o": o, "dout": dout, "lse": lse, "dlse": dlse}
        tensors |= {**options.tensors, **{f"d{x}": to for x, to in zip(TRAINED, outputs, strict=False)}, **sums}
        found = operator.launch(problem, tensors, is_blind=options.is_blind(q, k))
        if found and not operator.clears(problem, found) and not isinstance(options, Modified):
            operator.remember(planned, found.call, problem, inputs, asked)


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
    unpacked = [
        part.unpack(gradient[0], _gradient_like(x)) if gradient.numel() else gradient
        for part, gradient, x in zip(parts[1:4], found[:3], tensors[1:4], strict=True)
    ]
    return *unpacked, *found[3:]


def _gradient_like(tensor: torch.Tensor) -> torch.Tensor:
    """Room for its gradient, strided as it is where kernels can write to that."""
    if tensor.stride(-1) == 1:
        return torch.empty_like(tensor)
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _attention_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    dout, q, k, v, o, lse, dlse, *options, wants_dq, wants_dkv, wants_dsinks = arguments
    return _compute(dout, q, k, v, o, lse, dlse, Options(*options), wants_dq, wants_dkv, wants_dsinks)


def _attention_modified_backward(*arguments: Any) -> tuple[Any, ...]:
    dout, q, k, v, o, lse, dlse, *options, wants_dq, wants_dkv, wants_dsinks = arguments
    return _compute(dout, q, k, v, o, lse, dlse, Modified(*options), wants_dq, wants_dkv, wants_dsinks)


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("attention_backward", _attention_backward, _device)
    LIBRARY.impl("attention_modified_backward", _attention_modified_backward, _device)


@torch.library.register_fake("flashladder::attention_backward", lib=LIBRARY)
def _fake(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any) -> tuple[Any, ...]:
    wants_dq, wants_dkv, wants_dsinks = more[-3:]
    wanted = ((q, wants_dq), (k, wants_dkv), (v, wants_dkv))
    made = [_gradient_like(tensor) if is_wanted else q.new_empty(0) for tensor, is_wanted in wanted]
    return *made, q.new_empty(q.shape[2], dtype=torch.float32) if wants_dsinks else q.new_empty(0)


@torch.library.register_fake("flashladder::attention_modified_backward", lib=LIBRARY)
def _(*arguments: Any) -> tuple[Any, ...]:
    options = Modified(*arguments[7:-3])
    read = zip(options.read, options.asked, strict=True)
    return *_fake(*arguments), [torch.empty_like(x) if is_asked else x.new_empty(0) for x, is_asked in read]


@flops.formula("attention_backward", "attention_modified_backward")
def _(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any) -> int:
    _, _, _, *given, wants_dq, wants_dkv, _ = more
    options = (Options if len(given) == len(dataclasses.fields(Options)) else Modified)(*given)
    if not _launches(options, wants_dq, wants_dkv):
        return 0
    return 2 * operator.pairs(q, k, options) * (3 * q.shape[3] + 2 * v.shape[3])


def _refuse_again(ctx: Any, *_: Any) -> None:
    raise UnsupportedProblemError(
        "a gradient of a gradient is wanted (double backward), and no rung computes it: scaled_dot_product_attention "
        "with torch's math backend does"
    )


for _name in ("attention_backward", "attention_modified_backward"):
    torch.library.register_autograd(f"flashladder::{_name}", _refuse_again, lib=LIBRARY)
