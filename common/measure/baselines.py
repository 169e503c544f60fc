"""Other people's attention kernels behind one interface, to measure against.

"Official" is FlashAttention-2 as torch ships it. A baseline runs on the same tensors as our kernels, and computes the
log-sum-exp too, which is given where it costs nothing. Where a problem asks for none, cuDNN leaves it out, and the
others compute it all the same. What is not installed is named with the line that installs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from inspect import signature
from typing import Any, NamedTuple

import torch

from flashladder.common.errors import ConfigError, DeviceError, unknown
from flashladder.common.problem.problem import Problem, Tensors

OFFICIAL = {"forward": "fa2"}  # by operation
_BOUNDS = {"window": "no sliding window", "softcap": "no softcap", "alibi": "no ALiBi"}  # what not all take
_SCORES_LIMIT = 2**32  # bytes that textbook attention may take for S


class Output(NamedTuple):
    """O, (batch, seqlen_q, num_heads, head_dim), and LSE, (batch, num_heads, seqlen_q), where the library gives it.

    Those of the forward operation: kernels of another give a named tuple of its outputs.
    """

    o: torch.Tensor
    lse: torch.Tensor | None = None


RunOnce = Callable[[], Output]  # runs the kernel once


def _takes_anything(_: Problem) -> str | None:
    return None


@dataclass(frozen=True)
class Baseline:
    """A library's kernel."""

    name: str
    title: str
    module: str  # what is imported
    package: str  # whose version is quoted
    install: str
    bind: Callable[[Any, Problem, Tensors], RunOnce]  # with the imported module
    refuses: Callable[[Problem], str | None] = _takes_anything  # the reason, to be read after the title
    arches: tuple[int, ...] = (8, 9, 10, 12)  # major compute capabilities
    operation: str = "forward"
    bounds: tuple[str, ...] = ()  # which of `_BOUNDS` it is asked for

    def missing(self) -> str | None:
        """Why it cannot be used here, with the line that mends it; None when it can."""
        if self.module == "torch" and torch.version.cuda is None:
            return f"torch {torch.__version__} is a build without CUDA: {self.install}"
        try:
            self._import()
        except Exception as error:  # a foreign package may fail in any way
            return f"{self.module} cannot be imported ({_first_line(error)}): {self.install}"
        return None

    @property
    def version(self) -> str:
        """The package's version, as its metadata has it."""
        if self.package == "cudnn":
            return str(torch.backends.cudnn.version())
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return "unknown"

    def refusal(self, problem: Problem) -> str | None:
        """Why it does not take the problem on the current device; None when it does."""
        major, minor = torch.cuda.get_device_capability()
        reason = self._does_not_take(problem)
        if major not in self.arches:
            reason = f"has no kernel for sm_{major}{minor}"
        elif problem.head_dim > 256 or problem.head_dim % 8:
            reason = f"takes no head_dim of {problem.head_dim}"
        return f"{self.title} {reason}" if reason else None

    def _does_not_take(self, problem: Problem) -> str | None:
        if problem.operation != self.operation:
            return f"computes the operation {self.operation}, not {problem.operation}"
        if lacking := [no for name, no in _BOUNDS.items() if getattr(problem, name) and name not in self.bounds]:
            return f"is asked for {' and '.join(lacking)} here"
        return self.refuses(problem)

    def prepare(self, problem: Problem, tensors: Tensors) -> RunOnce:
        """What runs the kernel on these tensors. Raises DeviceError where it is missing or refuses."""
        if reason := self.missing() or self.refusal(problem):
            raise DeviceError(f"baseline {self.name}: {reason}")
        return self.bind(self._import(), problem, tensors)

    def _import(self) -> Any:
        return import_module(self.module)


class CpuBaseline(Baseline):
    """What torch computes on the CPU."""

    def missing(self) -> str | None:
        return None

    def refusal(self, problem: Problem) -> str | None:
        reason = self._does_not_take(problem)
        return f"{self.title} {reason}" if reason else None


def _takes_square_causal(problem: Problem) -> str | None:
    """Its causal masks are aligned to the top left."""
    unequal = problem.causal and problem.seqlen_q != problem.seqlen_k
    return "takes no causal mask with seqlen_q != seqlen_k" if unequal else None


def _takes_what_fits(problem: Problem) -> str | None:
    scores = 4 * problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k
    too_large = f"would need {scores / 2**30:.0f} GiB for S" if scores > _SCORES_LIMIT else None
    return too_large or _takes_square_causal(problem)


def _takes_contiguous(problem: Problem) -> str | None:
    return None if problem.layout == "bshd" else "takes contiguous tensors"


def _takes_no_groups(problem: Problem) -> str | None:
    return None if problem.num_heads == problem.num_heads_k else "takes no grouped queries"


def _torch_flash(_: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    if problem.window:
        return _torch_flash_in_window(problem, tensors)
    q, k, v = _heads_first(tensors)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention.default
    causal, scale = problem.causal, problem.softmax_scale

    def run() -> Output:
        o, lse, *_ = kernel(q, k, v, 0.0, causal, False, scale=scale)
        return Output(o.transpose(1, 2), lse)

    return run


def _torch_flash_in_window(problem: Problem, tensors: Tensors) -> RunOnce:
    """By the operator beneath, which takes a window."""
    q, k, v = tensors.q, tensors.k, tensors.v
    kernel = torch.ops.aten._flash_attention_forward.default
    causal, (left, right) = problem.causal, _window(problem, None)
    options = {"scale": problem.softmax_scale, "window_size_left": left, "window_size_right": right}

    def run() -> Output:
        o, lse, *_ = kernel(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, **options)
        return Output(o, lse)

    return run


def _torch_cudnn(_: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    q, k, v = _heads_first(tensors)
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    causal, scale = problem.causal, problem.softmax_scale

    def run() -> Output:
        o, lse, *_ = kernel(q, k, v, None, problem.lse, 0.0, causal, False, scale=scale)
        return Output(o.transpose(1, 2), lse.reshape(q.shape[:3]) if problem.lse else None)

    return run


def _torch_math(_: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    q, k, v = _heads_first(tensors)
    kernel = torch.ops.aten._scaled_dot_product_attention_math.default
    options = {"scale": problem.softmax_scale, "enable_gqa": problem.num_heads != problem.num_heads_k}

    def run() -> Output:
        return Output(kernel(q, k, v, None, 0.0, problem.causal, None, **options)[0].transpose(1, 2))

    return run


def _flash_attn(module: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    """flash_attn_func of FlashAttention 2 and 3: early releases of 3 give LSE unasked."""
    q, k, v = tensors.q, tensors.k, tensors.v
    options = _options(problem, -1)
    if "return_attn_probs" in signature(module.flash_attn_func).parameters:
        options["return_attn_probs"] = True  # gives LSE; without dropout no probabilities are made

    def run() -> Output:
        o, lse, *_ = module.flash_attn_func(q, k, v, **options)
        return Output(o, lse)

    return run


def _flash_attn_4(module: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    q, k, v = tensors.q, tensors.k, tensors.v
    options = {**_options(problem, None), "return_lse": True}

    def run() -> Output:
        o, lse, *_ = module.flash_attn_func(q, k, v, **options)
        return Output(o, lse)

    return run


def _options(problem: Problem, everything: int | None) -> dict[str, Any]:
    """What every flash_attn_func takes, and of bounds what is asked for: early releases lack some."""
    options: dict[str, Any] = {"softmax_scale": problem.softmax_scale, "causal": problem.causal}
    if problem.window:
        options["window_size"] = _window(problem, everything)
    if problem.softcap:
        options["softcap"] = problem.softcap
    return options


def _window(problem: Problem, everything: int | None) -> tuple[int | None, int | None]:
    """Its sides, with a library's word for all keys, whose number may be too large for the library's integers."""
    longest = max(problem.seqlen_q, problem.seqlen_k)
    left, right = (
        everything if keys is None or keys >= longest else keys for keys in (problem.window_left, problem.window_right)
    )
    return left, right


def _flashinfer(module: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    q, k, v = (tensor.flatten(0, 1) for tensor in (tensors.q, tensors.k, tensors.v))
    starts = torch.arange(problem.batch + 1, dtype=torch.int32, device=q.device)
    workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device=q.device)
    wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        starts * problem.seqlen_q,
        starts * problem.seqlen_k,
        problem.num_heads,
        problem.num_heads_k,
        problem.head_dim,
        causal=problem.causal,
        sm_scale=problem.softmax_scale,
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
    )

    def run() -> Output:
        return Output(wrapper.run(q, k, v, return_lse=True)[0].view(tensors.q.shape))  # its LSE is in log2

    return run


def _xformers(module: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    bias = module.fmha.attn_bias.LowerTriangularFromBottomRightMask() if problem.causal else None

    def run() -> Output:
        o, lse = module.fmha.memory_efficient_attention_forward_requires_grad(
            tensors.q, tensors.k, tensors.v, attn_bias=bias, scale=problem.softmax_scale
        )
        return Output(o, lse[..., : problem.seqlen_q])  # it comes padded

    return run


def _sdpa(_: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    q, k, v = _heads_first(tensors)
    grouped = problem.num_heads != problem.num_heads_k

    def run() -> Output:
        o = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=problem.causal, scale=problem.softmax_scale, enable_gqa=grouped
        )
        return Output(o.transpose(1, 2))

    return run


def _heads_first(tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tensors.q.transpose(1, 2), tensors.k.transpose(1, 2), tensors.v.transpose(1, 2)


def _takes_what_was_built(problem: Problem) -> str | None:
    """FlashAttention-3 can be built without types, bounds and more; asked for some of these it ends the process."""
    try:
        flags = import_module("flash_attn_config").CONFIG["build_flags"]
    except (ImportError, AttributeError, KeyError):
        return None  # a package that does not say: all is built
    wanted = {
        "FP16": ("fp16", problem.dtype == "fp16"),
        "LOCAL": ("sliding windows", problem.window),
        "SOFTCAP": ("softcaps", problem.softcap),
        "VARLEN": ("packed sequences", problem.packed),
    }
    for flag, (what, is_asked) in wanted.items():
        if is_asked and flags.get(f"FLASHATTENTION_DISABLE_{flag}"):
            return f"was built without {what}"
    size = next(d for d in (64, 96, 128, 192, 256) if problem.head_dim <= d)  # a wider one would do, but slowly
    return f"was built without head_dim {size}" if flags.get(f"FLASHATTENTION_DISABLE_HDIM{size}") else None


_TORCH = "pip install torch (a CUDA build)"
_FA3 = 'pip install "git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper"'
_ALL = (
    Baseline("fa2", "FlashAttention-2 (torch)", "torch", "torch", _TORCH, _torch_flash, bounds=("window",)),
    Baseline("cudnn", "cuDNN (torch)", "torch", "cudnn", _TORCH, _torch_cudnn, _takes_square_causal),
    Baseline("math", "textbook attention (torch)", "torch", "torch", _TORCH, _torch_math, _takes_what_fits),
    Baseline(
        name="flash-attn",
        title="FlashAttention-2",
        module="flash_attn",
        package="flash-attn",
        install="pip install flash-attn --no-build-isolation",
        bind=_flash_attn,
        bounds=("window", "softcap"),
    ),
    Baseline(
        name="fa3",
        title="FlashAttention-3",
        module="flash_attn_interface",
        package="flash_attn_3",
        install=_FA3,
        bind=_flash_attn,
        refuses=_takes_what_was_built,
        arches=(9,),
        bounds=("window", "softcap"),
    ),
    Baseline(
        name="fa4",
        title="FlashAttention-4",
        module="flash_attn.cute",
        package="flash-attn-4",
        install="pip install --pre flash-attn-4",
        bind=_flash_attn_4,
        arches=(9, 10),
        bounds=("window", "softcap"),
    ),
    Baseline(
        name="flashinfer",
        title="FlashInfer",
        module="flashinfer",
        package="flashinfer-python",
        install="pip install flashinfer-python",
        bind=_flashinfer,
        refuses=_takes_contiguous,
    ),
    Baseline("xformers", "xFormers", "xformers.ops", "xformers", "pip install xformers", _xformers, _takes_no_groups),
)
BASELINES = {baseline.name: baseline for baseline in _ALL}

_MATH = BASELINES["math"]
SDPA = CpuBaseline("sdpa", "scaled_dot_product_attention (torch)", "torch", "torch", "", _sdpa, _MATH.refuses)
AS_TORCH_CHOOSES = Baseline("sdpa", SDPA.title, "torch", "torch", _TORCH, _sdpa, _takes_square_causal)  # on a GPU
CPU_BASELINES = {"sdpa": SDPA, "math": CpuBaseline(**vars(_MATH))}


def find(name: str, among: Mapping[str, Baseline] = BASELINES) -> Baseline:
    """The baseline of this name; ConfigError lists those there are."""
    if name not in among:
        raise unknown("baseline", name, among)
    return among[name]


def official(operation: str) -> Baseline:
    """The kernel that an operation is measured against; ConfigError where nobody has one."""
    if operation not in OFFICIAL:
        raise ConfigError(f"there is no official kernel for the operation {operation}, only for {', '.join(OFFICIAL)}")
    return BASELINES[OFFICIAL[operation]]


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
