"""Attention as operators of torch, and a shorter way to the same kernels where nothing looks on."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from flashladder.common.api import documents, expressions, flops, pieces
from flashladder.common.api.options import Modified, Options
from flashladder.common.api.validate import Window
from flashladder.common.catalog import FASTEST, ladder_of
from flashladder.common.own import FIRST
from flashladder.common.problem.problem import LSE, Problem
from flashladder.common.runtime import fast_path, ready
from flashladder.common.runtime.calls import Call
from flashladder.common.runtime.launch import PROBLEMS_KEPT, GridError
from flashladder.common.runtime.outputs import new_lse, new_o, new_outputs, no_lse, shape_of_lse
from flashladder.common.runtime.ready import Ready, ready_for

# Is told of each call of attention that ran, where a program is recorded: the problem, and what says where packed
# sequences begin.
watch: Callable[[Problem, torch.Tensor | None, torch.Tensor | None], None] | None = None
# What stands ready for plain tensors, by what fast_path.cpp reads of a call; it only grows.
plain: dict[tuple[object, ...], Ready] = {}
# The plans of other problems that came often, as it finds them, each with the shape of the log-sum-exp.
planned: dict[bytes, tuple[Any, ...]] = {}
_remembering = threading.Lock()

onlookers = (  # each gives something where torch looks at what is called
    torch._C._len_torch_dispatch_stack,
    torch._C._functorch.peek_interpreter_stack,  # transforms
    torch._C._is_tracing,
    torch.autograd._profiler_enabled,
)

LIBRARY = torch.library.Library("flashladder", "FRAGMENT")
# Rows may lie further apart than where a model was traced: torch.compile pads what its own kernels write, and with the
# usual tag would copy it to unpadded rows before each call.
STRIDES = (torch.Tag.needs_fixed_stride_order,)
_OPTIONS = "bool causal, float? softmax_scale, str version, bool lse"
LIBRARY.define(f"attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)", tags=STRIDES)
LIBRARY.define(f"attention_out(Tensor q, Tensor k, Tensor v, Tensor(a!) out, {_OPTIONS}) -> Tensor", tags=STRIDES)


def in_cpp() -> ModuleType | None:
    """What launches what is plainly right and stands ready, if it is there; not where torch compiles, nor where each
    call is told to `watch`.
    """
    if torch.compiler.is_compiling():  # first: torch compiles anew where what was looked at changes
        return None
    return None if watch else fast_path.extension


def are_observed(*tensors: torch.Tensor) -> bool:
    """Whether torch should see an operator on these tensors."""
    if is_observed() or tensors[0].is_meta:
        return True
    return any(type(tensor) is not torch.Tensor for tensor in tensors)  # a fake tensor, or a distributed one


def is_observed() -> bool:
    """Whether torch compiles, traces, transforms or profiles, and so looks at what is called."""
    if torch.compiler.is_compiling():
        return True
    for looks in onlookers:
        if looks():
            flops.tell()
            return True
    return False


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, lse: bool, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """O, which is `out` if that is given, and the log-sum-exp, which has no elements unless `lse` asks for it.

    What has an `out` is plain.
    """
    if not are_observed(q, k, v):
        return compute(q, k, v, options, lse, out)
    asked = options.causal, options.softmax_scale, options.version, lse
    if out is not None:
        return out, torch.ops.flashladder.attention_out(q, k, v, out, *asked)
    if options.is_plain:
        o, sums = torch.ops.flashladder.attention(q, k, v, *asked)
    else:
        o, sums = operator_of(options)(q, k, v, *options.flat(), lse)
    return o, sums


def compute(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, lse: bool, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` without an operator, which torch does not see."""
    if options.documents is not None:
        return _compute_documents(q, k, v, options, lse)
    if options.cu_seqlens_q is not None:
        options.validate_sequences(q, k)
    if isinstance(options, Modified):
        expressions.check(options, q, k)
    may_be_planned = out is None and options.version == FASTEST and not options.is_plain
    may_be_planned = may_be_planned and not isinstance(options, Modified)
    given, asked = (q, k, v, *options.in_order), (*options.numbers, lse)
    if may_be_planned and (cpp := in_cpp()):
        done = cpp.remembered(onlookers, planned, given, asked, lse)
        if done is not None:
            return done if lse else (done, no_lse(q))
    problem = options.forward_problem(q, k, v, lse)
    outputs = new_outputs(problem, q, out)
    tensors = {"q": q, "k": k, "v": v, **options.tensors, **outputs}
    found = launch(problem, tensors, options.version, out is not None, problem.packed and options.is_blind(q, k))
    if found is not None:
        if problem.head_dim_v == problem.head_dim:
            if options.is_plain:
                plain[_signature(q, k, options, lse)] = found
            elif may_be_planned and not clears(problem, found):
                remember(planned, found.call, problem, given, asked, kept=(shape_of_lse(q, problem.packed),))
        if watch is not None:
            watch(problem, options.cu_seqlens_q, options.cu_seqlens_k)
    return outputs["o"], outputs[LSE] if lse else no_lse(q)


def _compute_documents(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, lse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    padding, options = documents.taken_out(options, q)
    if padding is None:
        return attend_here(q, k, v, options, lse)
    rows, keys = padding.rows, padding.keys
    o, sums = compute(rows.pack(q)[None], keys.pack(k)[None], keys.pack(v)[None], options, lse)
    if lse:
        sums = rows.unpack(sums.T, new_lse(q).mT, -math.inf).mT
    return rows.unpack(o[0], new_o(q, v.shape[3])), sums


def launch(
    problem: Problem,
    tensors: Mapping[str, torch.Tensor | None],
    version: str = FASTEST,
    out_is_given: bool = False,
    is_blind: bool = False,
) -> Ready | None:
    """Computes a problem of any operation on tensors by their names, outputs among them; None for what is left out.

    Rows of no packed sequence are those of one that sees no key. Where an input is empty, or nobody sees a key, kernels
    have nothing to do, and it returns None. What no launch takes at once is launched in pieces.
    """
    present = {name: x if x.dim() == 4 else x.contiguous() for name, x in tensors.items() if x is not None}
    device = next(iter(present.values())).device
    if is_blind or not all(present[name].numel() for name in problem.inputs):
        ready.choice_for(problem, device, version)  # or it is refused
        if out_is_given:
            ready.check_out(present["o"], present["q"], problem.head_dim_v)
        _clear(problem, present)
        return None
    found = ready_for(problem, device, version)
    if clears(problem, found):
        _clear(problem, present)
    try:
        found.launch(problem, present, out_is_given)
    except GridError as error:
        for piece, parts in pieces.halves(problem, present, error):
            launch(piece, parts, version)
    else:
        if problem.packed and not ready.is_gpu(device):  # the emulator gives all of its memory back
            _clear(problem, present, *(int(present[f"cu_seqlens_{of}"][-1]) for of in "qk"))
    for name in problem.outputs:  # of pieces they may have other strides
        if present[name] is not (wanted := tensors[name]) and wanted is not None:
            wanted.copy_(present[name])
    return found


def clears(problem: Problem, found: Ready) -> bool:
    """Whether rows of no packed sequence are written here, before kernels run, which write none of them."""
    return problem.packed and not found.rung.supports.rest


def _clear(problem: Problem, tensors: Mapping[str, torch.Tensor], end_q: int = 0, end_k: int = 0) -> None:
    """Outputs of packed sequences, from these rows and keys on, as of rows that see no key."""
    for name in problem.outputs:
        if tensors[name].dim() == 1:  # sums over all rows, which are 0 before
            continue
        rest = tensors[name][:, (end_k if name in ("dk", "dv") else end_q) :]
        if name != LSE:
            rest.zero_()
        elif "sinks" in tensors:
            rest.copy_(tensors["sinks"][:, None])
        else:
            rest.fill_(problem.asked.lse_without_keys)


def _signature(
    q: torch.Tensor, k: torch.Tensor, options: Options, lse: bool, same_bits: bool | None = None
) -> tuple[object, ...]:
    """What fast_path.cpp reads of a call with as many columns of V as of Q, and knows its kernel by.

    `same_bits`: whether gradients are to be the same in each run; None where nobody wants one.
    """
    num_heads, is_long = q.shape[2], k.shape[1] >= ladder_of(FIRST).long_from
    version, causal = options.version, options.causal
    return version, q.dtype, q.device, num_heads, num_heads != k.shape[2], q.shape[3], causal, lse, is_long, same_bits


def allow_gradients(q: torch.Tensor, k: torch.Tensor, options: Options, same_bits: bool) -> None:
    """C++ then takes calls like a plain one, which was computed, also where gradients are wanted: a rung gives them."""
    if found := plain.get(_signature(q, k, options, True)):
        plain[_signature(q, k, options, True, same_bits)] = found


def remember(
    plans: dict[bytes, tuple[Any, ...]],
    call: Call | None,
    problem: Problem,
    tensors: tuple[torch.Tensor | None, ...],
    *asked: tuple[Any, ...],
    kept: tuple[Any, ...] = (),
) -> None:
    """That tensors like these and any of what is `asked` for are this problem, once there is a plan for it.

    fast_path.cpp finds it in `plans`, with what else it needs, which is `kept`.
    """
    extension = fast_path.extension
    planned = call and call.planned(problem, now=call.plan is not None)  # without a plan for all, it was asked for
    if not (extension and call and planned):
        return
    with _remembering:
        for key in filter(None, (extension.said(tensors, each) for each in asked)):
            plans.pop(key, None)  # what is given and what is validated are often the same
            while len(plans) >= PROBLEMS_KEPT:
                plans.pop(next(iter(plans)), None)
            plans[key] = planned, problem.softmax_scale, *kept, call


def make_ready(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: Window, softcap: float, packed: bool, sinks: bool
) -> None:
    """The kernel of a causal call with tensors like these, of other lengths or packed, which no call then waits for."""
    others: dict[str, Any] = {"head_dim_v": v.shape[3], "sinks": sinks, "lse": False}
    if packed:
        others |= {"operation": "packed", "batch": 1, "total_q": q.shape[1], "total_k": k.shape[1]}
    left, right = window
    options = Options(causal=True, window_left=left, window_right=right, softcap=softcap)
    ready_for(options.problem(q, k, **others), q.device)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    version: str,
    lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return attend_here(q, k, v, Options(causal=causal, softmax_scale=softmax_scale, version=version), lse)


def attend_here(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, lse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As compiled models call it, in C++ where that will do."""
    if options.is_plain and (cpp := in_cpp()):
        asked = options.causal, options.softmax_scale, options.version, lse
        done = cpp.straight(onlookers, plain, q, k, v, None, *asked, False, None)
        if done is not None:
            return done if lse else (done, no_lse(q))
    return compute(q, k, v, options, lse)


def _attention_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    version: str,
    lse: bool,
) -> torch.Tensor:
    return compute(q, k, v, Options(causal=causal, softmax_scale=softmax_scale, version=version), lse, out)[1]


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("attention", _attention, _device)
    LIBRARY.impl("attention_out", _attention_out, _device)


def _general(name: str, kind: type[Options]) -> Any:
    """The operator of what is not plain, whose options are of a kind."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *values: Any) -> tuple[torch.Tensor, ...]:
        *options, lse = values
        return compute(q, k, v, kind(*options), lse)

    def fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *values: Any) -> tuple[torch.Tensor, ...]:
        *options, lse = values
        is_packed = kind(*options).cu_seqlens_q is not None
        return new_o(q, v.shape[3]), (new_lse(q, is_packed) if lse else no_lse(q))

    schema = f"(Tensor q, Tensor k, Tensor v, {kind.schema()}, bool lse) -> (Tensor, Tensor)"
    made = torch.library.custom_op(f"flashladder::{name}", run, mutates_args=(), schema=schema, tags=STRIDES)
    made.register_fake(fake)
    return made


attention_general = _general("attention_general", Options)
attention_modified = _general("attention_modified", Modified)  # apart: torch batches no operator that takes a list


def operator_of(options: Options) -> Any:
    """The operator that takes options like these, which are not plain."""
    return attention_modified if isinstance(options, Modified) else attention_general


@torch.library.register_fake("flashladder::attention", lib=LIBRARY)
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> tuple[torch.Tensor, ...]:
    return new_o(q, v.shape[3]), (new_lse(q) if options[-1] else no_lse(q))


@torch.library.register_fake("flashladder::attention_out", lib=LIBRARY)
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *options: Any) -> torch.Tensor:
    return new_lse(q) if options[-1] else no_lse(q)


@flops.formula("attention", "attention_out")
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> int:
    return 2 * pairs(q, k, Options()) * (q.shape[3] + v.shape[3])


@flops.formula("attention_general", "attention_modified")
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *values: Any) -> int:
    return 2 * pairs(q, k, Options(*values[: len(dataclasses.fields(Options))])) * (q.shape[3] + v.shape[3])


def pairs(q: torch.Tensor, k: torch.Tensor, options: Options) -> int:
    """How many queries of all heads meet a key of their sequence."""
    if options.cu_seqlens_q is None or options.cu_seqlens_k is None:
        return q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1]
    rows = flops.lengths(options.cu_seqlens_q.diff(), options.max_seqlen_q)
    keys = flops.lengths(options.cu_seqlens_k.diff(), options.max_seqlen_k)
    return q.shape[2] * sum(a * b for a, b in zip(rows, keys, strict=True))
