"""attention as torch knows it: an operator, and a shorter way to the same kernels where nothing looks on.

A rung is resolved, configured and built once for all tensors of a kind, whatever their lengths: see `Ready`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, TypeVar

import torch

from flashladder.common.catalog import Version
from flashladder.common.compiler import PtxModule, build_one, cached, prebuilt, translate, translated
from flashladder.common.console import warn
from flashladder.common.errors import DeviceError, UnsupportedProblemError
from flashladder.common.own import FIRST_OPERATION
from flashladder.common.problem.config import KernelConfig, listing
from flashladder.common.problem.inputs import Tensors, allocate
from flashladder.common.problem.problem import DTYPES, Problem
from flashladder.common.runtime import ahead, fast_path, overlap, target
from flashladder.common.runtime.calls import Call
from flashladder.common.runtime.execute import on_emulator
from flashladder.common.runtime.launch import PROBLEMS_KEPT, check
from flashladder.common.runtime.target import Target
from flashladder.common.runtime.tuned import LONG_FROM, is_long, of_each_length

QUIET = "FLASHLADDER_QUIET"
Made = TypeVar("Made", bound=PtxModule)
_problem = lru_cache(PROBLEMS_KEPT, typed=True)(Problem)  # calls that come often are of few
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_preparing = threading.Lock()
watch: Callable[..., None] | None = None  # is told of each call that ran, where a program is recorded
# By what the choice of a kernel may depend on; of lengths that is whether keys are long, which comes last.
# It only grows: fast_path.cpp relies on that.
_ready: dict[tuple[object, ...], Ready] = {}

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


@dataclass(frozen=True)
class Ready:
    """A rung, configured and built for tensors of a kind on a device; without `call` on the emulator."""

    rung: Version
    artifact: PtxModule
    call: Call | None

    @cached_property
    def check(self) -> Callable[[Problem], None]:
        """Raises UnsupportedProblemError for a problem that the rung does not take."""
        return lru_cache(PROBLEMS_KEPT)(lambda problem: self.rung.check(problem, self.artifact.config))

    @cached_property
    def plan_at(self) -> int:
        """The plan of fast_path.cpp, which asks for it; 0: none."""
        return self.call.plan_at if self.call else 0


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
    extension = fast_path.extension
    if not extension or watch or torch.compiler.is_compiling():
        return None
    return extension.straight(_onlookers, _ready, q, k, v, out, causal, softmax_scale, version, lse)


def on_remembered_path(
    plans: Mapping[bytes, tuple[Any, ...]], tensors: tuple[Any, ...], options: tuple[Any, ...], lse: bool
) -> Any:
    """The same of a problem that `plans` has under what tensors and options say.

    The tensors are in the operation's order, Q the first; those left out are None.
    """
    extension = fast_path.extension
    if not extension or torch.compiler.is_compiling():
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
    shape, keys = q.shape, k.shape
    if len(shape) != 4:
        raise misshapen("q", q)
    if len(keys) != 4:
        raise misshapen("k", k)
    apart = apart_of(q, v)
    kind = version, q.dtype, q.device, shape[2], shape[3], causal, lse, *apart.values(), keys[1] >= LONG_FROM
    ready = _ready.get(kind) or _prepare(kind, problem_of(q, k, causal, None, lse, **apart), q, version)
    o = fast_path.new_o(q, v.shape[3]) if out is None else out
    sums = fast_path.new_lse(q) if lse else None
    scale = shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    if ready.call is None or not ready.call.launch_fast((q, k, v, o, sums), scale):
        tensors = {"q": q, "k": k, "v": v, "o": o} | ({} if sums is None else {"lse": sums})
        slow_path(ready, problem_of(q, k, causal, softmax_scale, lse, **apart), tensors, out is not None)
    return o, sums


def _sums(q: torch.Tensor, lse: bool) -> torch.Tensor:
    """Memory for the log-sum-exp, without elements where nobody asks for it: operators have no optional outputs."""
    return fast_path.new_lse(q) if lse else q.new_empty((0,), dtype=torch.float32)


def _to_new(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> tuple[torch.Tensor, ...]:
    o, sums = straight(q, k, v, None, *options)
    return o, (_sums(q, False) if sums is None else sums)


def _to_given(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *options: Any) -> torch.Tensor:
    _, sums = straight(q, k, v, out, *options)
    return _sums(q, False) if sums is None else sums


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("attention", _to_new, _device)
    LIBRARY.impl("attention_out", _to_given, _device)


@torch.library.register_fake("flashladder::attention", lib=LIBRARY)
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> tuple[torch.Tensor, ...]:
    return q.new_empty((*q.shape[:3], v.shape[3])), _sums(q, options[-1])


@torch.library.register_fake("flashladder::attention_out", lib=LIBRARY)
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *options: Any) -> torch.Tensor:
    return _sums(q, options[-1])


def slow_path(ready: Ready, problem: Problem, tensors: dict[str, torch.Tensor], o_is_given: bool = False) -> None:
    """On the emulator; and on a GPU for tensors out of the ordinary. UnsupportedProblemError where they will not do."""
    ready.check(problem)
    given = Tensors(tensors, problem.asked)
    if o_is_given:
        check_out(tensors["o"], tensors["q"], problem.head_dim_v)
        check(problem, given)
        check_apart(tensors["o"], {name: tensors[name] for name in problem.asked.inputs})
    if ready.call:
        ready.call.launch(problem, given)
    else:
        check(problem, given)
        _emulate(ready.artifact, problem, tensors)


def check_out(out: torch.Tensor, q: torch.Tensor, head_dim_v: int) -> None:
    """Raises UnsupportedProblemError unless O, which is like q but for its columns, has room there."""
    shape = (*q.shape[:3], head_dim_v)
    if (tuple(out.shape), out.dtype, out.device) != (shape, q.dtype, q.device):
        raise UnsupportedProblemError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}; O is {shape} {q.dtype} on {q.device}"
        )
    if not overlap.is_apart_in_itself(out.shape, out.stride()):
        raise UnsupportedProblemError(
            f"out has strides {out.stride()}, by which elements lie on each other; it takes memory for each"
        )


def check_apart(out: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> None:
    """Raises UnsupportedProblemError where O would be written over an input."""
    for name, tensor in inputs.items():
        if overlap.share(out, tensor):
            raise UnsupportedProblemError(f"out shares memory with {name}; it takes memory of its own")


def written(out: torch.Tensor, o: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`out` with O in it. UnsupportedProblemError where it has no room for O, or is an input's memory."""
    check_out(out, q, o.shape[3])
    check_apart(out, {"q": q, "k": k, "v": v})
    return out.copy_(o)


def _emulate(artifact: PtxModule, problem: Problem, tensors: dict[str, torch.Tensor]) -> None:
    """On copies of the tensors, in memory whose bounds the emulator knows."""
    copies = allocate(problem)
    for name in problem.asked.inputs:
        copies.by_name[name].copy_(tensors[name])
    on_emulator(artifact, problem, copies, race=False)
    for name in (*problem.outputs, *problem.asked.updated):
        tensors[name].copy_(copies.by_name[name])


def prepared(problem: Problem, q: torch.Tensor, version: str) -> Ready:
    """What runs tensors of the kind of q and the problem, made ready at the first call for it."""
    kind: tuple[object, ...] = (version, q.dtype, q.device, *q.shape[2:], problem.causal, problem.lse)
    kind += (problem.head_dim_v,) if problem.head_dim_v != problem.head_dim else ()
    if not _is_plain(problem):
        kind += (
            problem.packed,
            problem.window,
            problem.softcap > 0,
            problem.alibi,
            problem.sinks,
            problem.dropout_p > 0,
            problem.operation,
            problem.options,
        )
    return ready_for((*kind, is_long(problem)), problem, q, version)


def ready_for(kind: tuple[object, ...], problem: Problem, q: torch.Tensor, version: str) -> Ready:
    """What stands ready for a kind, the last of which is whether keys are long; made ready at the first call for it."""
    return _ready.get(kind) or _prepare(kind, problem, q, version)


def _is_plain(problem: Problem) -> bool:
    """Whether the shorter way takes it."""
    has_more = (
        problem.packed or problem.window or problem.softcap or problem.alibi or problem.sinks or problem.dropout_p
    )
    return problem.operation == FIRST_OPERATION and not has_more


def _prepare(kind: tuple[object, ...], problem: Problem, q: torch.Tensor, version: str) -> Ready:
    """What runs on the device of q: as tuned for it, or the rung's default. Compiles it if it must.

    With it what runs for keys of the other class of lengths: generation may come to them.
    """
    gpu = is_gpu(q)
    with _preparing:
        if kind in _ready:  # another thread has been here
            return _ready[kind]
        if not gpu and q.device.type != "cpu":
            raise UnsupportedProblemError(f"q is on {q.device}; kernels run on NVIDIA's GPUs, or emulated on the CPU")
        if gpu and torch.cuda.is_current_stream_capturing():
            raise DeviceError(
                "the first call for tensors of a kind loads a kernel, which a CUDA graph cannot capture: "
                f"call attention once before the capture, on such tensors: {problem.name}"
            )
        with torch.cuda.device(q.get_device()):  # -1 on the CPU: none
            place = target.resolve("gpu" if gpu else "emulator", None)
            asked = {is_long(each): _configured(version, each, place) for each in of_each_length(problem)}
            device = q.device if gpu else None
            made = {each: _made(*each, place, problem, device) for each in dict.fromkeys(asked.values())}
        _ready.update({(*kind[:-1], length): made[each] for length, each in asked.items()})
        return _ready[kind]


def _configured(version: str, problem: Problem, place: Target) -> tuple[Version, KernelConfig]:
    """The rung that a version means for a problem, as tuned for the GPU, or as the version says."""
    rung, config = ahead.configured(version, problem, place.arch, place.gpu, not place.on_gpu)
    rung.check(problem, config)
    return rung, config


def _made(rung: Version, config: KernelConfig, place: Target, problem: Problem, device: torch.device | None) -> Ready:
    """The rung, built and loaded where there is a device; what the emulator runs of it where there is none."""
    kernel = rung, config, place.arch
    if device is None:
        module = _told(translated, translate, kernel)
        place.check(module)
        return Ready(rung, module, None)
    artifact = prebuilt.find(*kernel) or _told(cached, build_one, kernel)
    place.check(artifact)
    return Ready(rung, artifact, Call(rung, artifact, problem, device))


def is_gpu(tensor: torch.Tensor) -> bool:
    """Whether kernels are launched on it, not emulated."""
    return tensor.is_cuda


@cache
def arch_of(device: torch.device) -> str:
    """What kernels are compiled for where tensors lie."""
    if device.type != "cuda":
        return target.resolve("emulator", None).arch
    with torch.cuda.device(device):
        return target.resolve("gpu", None).arch


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


def _told(
    find: Callable[..., Made | None], make: Callable[..., Made], kernel: tuple[Version, KernelConfig, str]
) -> Made:
    """From the cache, or compiled, which takes seconds: that is told, unless FLASHLADDER_QUIET is set."""
    if os.environ.get(QUIET) or find(*kernel):
        return make(*kernel)
    rung, config, arch = kernel
    warn(f"compiling {rung.name} for {arch}, once, which takes some seconds: {config}")
    begin = time.monotonic()
    made = make(*kernel)
    warn(f"compiled in {time.monotonic() - begin:.1f} s")
    return made
