"""attention as torch knows it: an operator, and a shorter way to the same kernels where nothing looks on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch

from flashladder.common.catalog import ladder_of
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.own import FIRST_OPERATION
from flashladder.common.problem.config import listing
from flashladder.common.problem.problem import DTYPES, Problem
from flashladder.common.runtime import fast_path
from flashladder.common.runtime.launch import PROBLEMS_KEPT
from flashladder.common.runtime.outputs import new_lse, new_o, no_lse
from flashladder.common.runtime.ready import Ready, check_apart, check_out, ready_for

_problem = lru_cache(PROBLEMS_KEPT, typed=True)(Problem)  # calls that come often are of few
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
watch: Callable[..., None] | None = None  # is told of each call that ran, where a program is recorded
# What stands ready for plain tensors, by what fast_path.cpp reads of a call; it only grows.
_plain: dict[tuple[object, ...], Ready] = {}

_onlookers = (  # each gives something where torch looks at what is called
    torch._C._len_torch_dispatch_stack,
    torch._C._functorch.peek_interpreter_stack,  # transforms
    torch._C._is_tracing,
    torch.autograd._profiler_enabled,
)

LIBRARY = torch.library.Library("flashladder", "FRAGMENT")
_OPTIONS = "bool causal, float? softmax_scale, str version, bool lse"
LIBRARY.define(f"attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)")
LIBRARY.define(f"attention_out(Tensor q, Tensor k, Tensor v, Tensor(a!) out, {_OPTIONS}) -> Tensor")


def on_fast_path(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    causal: bool,
    softmax_scale: float | None,
    version: str,
    lse: bool,
) -> Any:
    """O, or (O, log-sum-exp) with `lse`, of what is plainly right and stands ready in C++; None for all else."""
    if torch.compiler.is_compiling():  # first: torch compiles anew where what was looked at changes
        return None
    if not (extension := fast_path.extension) or watch:
        return None
    return extension.straight(_onlookers, _plain, q, k, v, out, causal, softmax_scale, version, lse)


def on_remembered_path(
    plans: Mapping[bytes, tuple[Any, ...]], tensors: tuple[Any, ...], options: tuple[Any, ...], lse: bool
) -> Any:
    """The same of a problem that `plans` has under what tensors and options say.

    The tensors are in the operation's order, Q the first; those left out are None.
    """
    if torch.compiler.is_compiling() or not (extension := fast_path.extension):
        return None
    return extension.remembered(_onlookers, plans, tensors, options, lse)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, *options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """O, which is `out` if that is given, and the log-sum-exp; what that is where nobody asks for it is undefined.

    The options are causal, softmax_scale, version and lse: whether the log-sum-exp is.
    """
    found: tuple[torch.Tensor, torch.Tensor | None]
    if not seen(q, k, v):
        found = straight(q, k, v, out, *options)
    elif out is None:
        found = torch.ops.flashladder.attention(q, k, v, *options)
    else:
        found = out, torch.ops.flashladder.attention_out(q, k, v, out, *options)
    if watch is not None:
        watch(q, k, *options, **apart_of(q, v))
    return found


def seen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether torch should see an operator."""
    of_torch = type(q) is type(k) is type(v) is torch.Tensor  # not a fake tensor, nor a distributed one
    return watched() or not of_torch or q.is_meta


def watched() -> bool:
    """Whether torch compiles, traces, transforms or profiles, and so looks at what is called."""
    if torch.compiler.is_compiling():
        return True
    for looks in _onlookers:  # noqa: SIM110 - any() takes twice as long
        if looks():
            return True
    return False


def straight(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    causal: bool,
    softmax_scale: float | None,
    version: str,
    lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`forward` without an operator, which torch does not see."""
    apart = apart_of(q, v)
    problem = problem_of(q, k, causal, softmax_scale, lse, **apart)
    ready = ready_for(problem, q, version)
    if not apart:
        _plain[_signature(q, k, causal, version, lse)] = ready
    o = new_o(q, v.shape[3]) if out is None else out
    tensors = {"q": q, "k": k, "v": v, "o": o} | ({"lse": new_lse(q)} if lse else {})
    ready.launch(problem, tensors, out_is_given=out is not None)
    return o, tensors.get("lse")


def _signature(q: torch.Tensor, k: torch.Tensor, causal: bool, version: str, lse: bool) -> tuple[object, ...]:
    """What fast_path.cpp reads of a call with as many columns of V as of Q, and knows its kernel by."""
    num_heads, is_long = q.shape[2], k.shape[1] >= ladder_of(FIRST_OPERATION).long_from
    return version, q.dtype, q.device, num_heads, num_heads != k.shape[2], q.shape[3], causal, lse, is_long


def _to_new(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> tuple[torch.Tensor, ...]:
    o, lse = straight(q, k, v, None, *options)
    return o, (no_lse(q) if lse is None else lse)


def _to_given(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *options: Any) -> torch.Tensor:
    _, lse = straight(q, k, v, out, *options)
    return no_lse(q) if lse is None else lse


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("attention", _to_new, _device)
    LIBRARY.impl("attention_out", _to_given, _device)


@torch.library.register_fake("flashladder::attention", lib=LIBRARY)
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> tuple[torch.Tensor, ...]:
    return new_o(q, v.shape[3]), (new_lse(q) if options[-1] else no_lse(q))


@torch.library.register_fake("flashladder::attention_out", lib=LIBRARY)
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *options: Any) -> torch.Tensor:
    return new_lse(q) if options[-1] else no_lse(q)


def written(out: torch.Tensor, o: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`out` with O in it. UnsupportedProblemError where it has no room for O, or is an input's memory."""
    check_out(out, q, o.shape[3])
    check_apart(out, {"q": q, "k": k, "v": v})
    return out.copy_(o)


def problem_of(
    q: torch.Tensor, k: torch.Tensor, causal: bool, softmax_scale: float | None, lse: bool, **others: Any
) -> Problem:
    """What tensors (batch, seqlen, heads, head_dim) ask for; `others` are fields that they do not say, or say wrong."""
    for name, tensor in (("q", q), ("k", k)):
        if tensor.dim() != 4:
            raise misshapen(name, tensor)
    if q.dtype not in _NAMES:
        raise UnsupportedProblemError(f"q is {q.dtype}; kernels take {listing(_NAMES)}")
    batch, seqlen_q, num_heads, head_dim = q.shape
    sizes = {
        "batch": batch,
        "num_heads": num_heads,
        "num_heads_k": k.shape[2],
        "seqlen_q": seqlen_q,
        "seqlen_k": k.shape[1],
        "head_dim": head_dim,
        "dtype": _NAMES[q.dtype],
    }
    return _problem(**{**sizes, "causal": causal, "softmax_scale": softmax_scale, "lse": lse, **others})


def apart_of(q: torch.Tensor, v: torch.Tensor) -> dict[str, int]:
    """The head_dim_v that a problem is told, where it is another than q's head_dim."""
    if v.dim() != 4:
        raise misshapen("v", v)
    return {} if v.shape[3] == q.shape[3] else {"head_dim_v": v.shape[3]}


def misshapen(name: str, tensor: torch.Tensor) -> UnsupportedProblemError:
    """The refusal of a tensor that is not of four dimensions."""
    shape = tuple(tensor.shape)
    return UnsupportedProblemError(f"{name} has shape {shape}; it should be (batch, seqlen, heads, head_dim)")
