"""An attention problem: its shape, seeded inputs in guarded memory, the exact answer, and the verdict on an output."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch

from flashladder.common.buffers import Buffer, View, contiguous, poison, unwritten
from flashladder.common.errors import UnsupportedProblemError, VerificationError
from flashladder.common.families import FAMILIES, NORMAL

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS = ("bshd", "bhsd", "padded", "qkv")
_CPU_DRAW_LIMIT = 2**25  # elements: larger inputs are drawn on the GPU they are for
_FP64_LIMIT = 2**36  # FLOPs: larger exact answers are computed in fp32 where there is a GPU
_SCORES_LIMIT = 2**25  # elements of S held at a time by `attention`
_SCALES = (2.0**-126, 2.0**127)  # fp32's normal numbers; kernels multiply by log2(e)
_TINY = 1e-5  # added to the tolerance, for outputs that 16-bit torch gets exactly


@dataclass(frozen=True)
class Problem:
    """One attention call. Left at None: num_heads_k = num_heads, seqlen_k = seqlen_q, softmax_scale = 1/sqrt(head_dim),
    or what the family of inputs wants.

    Causal masks are aligned to the bottom right: query i sees the keys j <= i + seqlen_k - seqlen_q.
    Raises UnsupportedProblemError for values that are no attention problem.
    """

    batch: int = 1
    num_heads: int = 1
    num_heads_k: int = None  # type: ignore[assignment]  # set in __post_init__, as the other two
    seqlen_q: int = 256
    seqlen_k: int = None  # type: ignore[assignment]
    head_dim: int = 128
    dtype: str = "bf16"
    causal: bool = False
    softmax_scale: float = None  # type: ignore[assignment]
    seed: int = 0
    layout: str = "bshd"
    family: str = NORMAL  # of inputs: one of FAMILIES

    def __post_init__(self) -> None:
        for name in ("batch", "num_heads", "seqlen_q", "head_dim"):
            self._require_positive(name)
        for name, known in (("dtype", DTYPES), ("layout", LAYOUTS), ("family", FAMILIES)):
            if getattr(self, name) not in known:
                raise UnsupportedProblemError(f"{name}={getattr(self, name)}: must be one of {', '.join(known)}")
        scale_of = FAMILIES[self.family].softmax_scale
        scale = scale_of(DTYPES[self.dtype]) if scale_of else self.head_dim**-0.5
        defaults = {"num_heads_k": self.num_heads, "seqlen_k": self.seqlen_q, "softmax_scale": scale}
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name in ("num_heads_k", "seqlen_k"):
            self._require_positive(name)
        if not 0 < self.softmax_scale < math.inf:  # kernels take a row's maximum before they scale
            raise UnsupportedProblemError(f"softmax_scale={self.softmax_scale}: must be a positive, finite number")
        if not _SCALES[0] <= self.softmax_scale <= _SCALES[1]:
            low, high = (f"{limit:.2g}" for limit in _SCALES)
            raise UnsupportedProblemError(
                f"softmax_scale={self.softmax_scale}: kernels hold it in fp32, which takes {low} to {high}"
            )
        if self.num_heads % self.num_heads_k:
            raise UnsupportedProblemError(
                f"num_heads={self.num_heads} must be a multiple of num_heads_k={self.num_heads_k}"
            )
        if self.layout == "qkv" and self.seqlen_q != self.seqlen_k:
            raise UnsupportedProblemError(
                f"layout=qkv packs q, k and v row by row: seqlen_q={self.seqlen_q} must equal seqlen_k={self.seqlen_k}"
            )

    def _require_positive(self, name: str) -> None:
        if getattr(self, name) < 1:
            raise UnsupportedProblemError(f"{name}={getattr(self, name)}: must be at least 1")

    @property
    def flops(self) -> float:
        """The two matrix products' operations over the keys that are seen; a causal square counts half."""
        rows, keys = self.seqlen_q, float(self.seqlen_k)
        if self.causal:
            rows, keys = min(rows, self.seqlen_k), (max(0, self.seqlen_k - self.seqlen_q) + self.seqlen_k) / 2
        return 4.0 * self.batch * self.num_heads * rows * keys * self.head_dim

    @property
    def name(self) -> str:
        """The shape, and what differs from the defaults ('batch=4,num_heads=16,...,causal=true')."""
        always = ("batch", "num_heads", "seqlen_q", "head_dim", "dtype")
        plain = Problem(num_heads=self.num_heads, seqlen_q=self.seqlen_q, head_dim=self.head_dim)
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        shown = {name: value for name, value in values.items() if name in always or value != getattr(plain, name)}
        return ",".join(f"{name}={'true' if value is True else value}" for name, value in shown.items())


@dataclass(frozen=True)
class Tensors:
    """Inputs and outputs of one problem, (batch, seqlen, heads, head_dim); lse (batch, heads, seqlen_q), fp32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    lse: torch.Tensor
    buffers: tuple[Buffer, ...]

    def poison(self) -> None:
        """Fill the outputs with a NaN; to be called before each run that is verified."""
        poison(self.o)
        poison(self.lse)


def make_inputs(problem: Problem, device: torch.device | str = "cpu") -> Tensors:
    """q, k and v of the problem's family for its seed, in its layout, and poisoned outputs, all in guarded memory.

    One seed gives the same numbers in every layout and, up to 2^25 elements, on every device.
    """
    tensors = allocate(problem, device)
    large = sum(tensor.numel() for tensor in (tensors.q, tensors.k, tensors.v)) > _CPU_DRAW_LIMIT
    draw(problem, tensors.q, tensors.k, tensors.v, device if large else "cpu")
    return tensors


def allocate(problem: Problem, device: torch.device | str = "cpu") -> Tensors:
    """The same with inputs that are still to be drawn."""
    buffers = [
        Buffer(views, torch.float32 if "lse" in views else DTYPES[problem.dtype], device)
        for views in _buffer_views(problem)
    ]
    views = {name: view for buffer in buffers for name, view in buffer.views.items()}
    tensors = Tensors(**views, buffers=tuple(buffers))
    tensors.poison()
    return tensors


def draw(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, device: torch.device | str = "cpu"
) -> None:
    """Fills q, k and v with the inputs of the problem, whose numbers are drawn on the device."""
    generator = torch.Generator(device=device).manual_seed(problem.seed)
    FAMILIES[problem.family].draw(q, k, v, problem.softmax_scale, generator)


def _buffer_views(problem: Problem) -> list[dict[str, View]]:
    """What shares a buffer, and where in it."""
    p = problem
    q, k = (p.batch, p.seqlen_q, p.num_heads, p.head_dim), (p.batch, p.seqlen_k, p.num_heads_k, p.head_dim)
    lse = {"lse": contiguous(p.batch, p.num_heads, p.seqlen_q)}
    if p.layout != "qkv":
        return [{name: _view(p.layout, shape)} for name, shape in zip("qkvo", (q, k, k, q), strict=True)] + [lse]
    strides = contiguous(p.batch, p.seqlen_q, p.num_heads + 2 * p.num_heads_k, p.head_dim).strides
    first_heads = {"q": 0, "k": p.num_heads, "v": p.num_heads + p.num_heads_k}
    packed = {name: View(q if name == "q" else k, strides, head * p.head_dim) for name, head in first_heads.items()}
    return [packed, {"o": contiguous(*q)}, lse]


def _view(layout: str, shape: tuple[int, int, int, int]) -> View:
    batch, seqlen, heads, head_dim = shape
    if layout == "bhsd":
        by_batch, by_head, by_row, _ = contiguous(batch, heads, seqlen, head_dim).strides
        return View(shape, (by_batch, by_row, by_head, 1))
    if layout == "padded":
        return View(shape, contiguous(batch, seqlen + 3, heads + 1, head_dim + 8).strides)
    return contiguous(*shape)


@dataclass(frozen=True)
class Expected:
    """The exact output, and how far a kernel may be from it."""

    o: torch.Tensor
    lse: torch.Tensor
    tolerance: float
    lse_tolerance: float


def expect(problem: Problem, tensors: Tensors) -> Expected:
    """The exact answer: in fp64 (fp32 for large problems on a GPU), with FlashAttention's tolerance rule.

    An output may be twice as far from the exact answer as 16-bit torch is; lse as far as fp32 arithmetic goes.
    """
    large = tensors.q.is_cuda and problem.flops > _FP64_LIMIT
    exact, lse = attention(problem, tensors, torch.float32 if large else torch.float64)
    rounded, _ = attention(problem, tensors, DTYPES[problem.dtype])
    largest_lse = float(lse[lse.isfinite()].abs().max()) if lse.isfinite().any() else 0.0
    return Expected(
        o=exact,
        lse=lse,
        tolerance=2 * float((rounded - exact).abs().max()) + _TINY,
        lse_tolerance=1e-5 * (1 + largest_lse),
    )


def attention(problem: Problem, tensors: Tensors, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Textbook attention with every intermediate in `dtype`: o like q, and lse; rows that see no key get 0 and -inf."""
    p = problem
    o = torch.empty(tensors.q.shape, dtype=dtype, device=tensors.q.device)
    lse = torch.empty(tensors.lse.shape, dtype=dtype, device=tensors.q.device)
    rows = max(1, _SCORES_LIMIT // (p.num_heads * p.seqlen_k))
    with _full_precision_matmul():
        for batch in range(p.batch):
            q = tensors.q[batch].transpose(0, 1).to(dtype) * p.softmax_scale
            k, v = (
                tensor[batch].transpose(0, 1).to(dtype).repeat_interleave(p.num_heads // p.num_heads_k, 0)
                for tensor in (tensors.k, tensors.v)
            )
            for begin in range(0, p.seqlen_q, rows):
                block = slice(begin, min(begin + rows, p.seqlen_q))
                scores = q[:, block] @ k.transpose(1, 2)
                if p.causal:
                    scores.masked_fill_(_hidden(p, block, scores.device), -math.inf)
                lse[batch, :, block] = scores.logsumexp(-1)
                probabilities = scores.softmax(-1).masked_fill_(lse[batch, :, block, None] == -math.inf, 0)
                o[batch, block] = (probabilities @ v).transpose(0, 1)
    return o, lse


def _hidden(problem: Problem, rows: slice, device: torch.device) -> torch.Tensor:
    """Which keys each of the rows does not see under a causal mask: (rows, seqlen_k)."""
    last_seen = torch.arange(rows.start, rows.stop, device=device) + problem.seqlen_k - problem.seqlen_q
    return torch.arange(problem.seqlen_k, device=device) > last_seen[:, None]


@contextlib.contextmanager
def _full_precision_matmul() -> Iterator[None]:
    """No TF32, whatever the process has set."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@dataclass(frozen=True)
class Check:
    """The verdict on one run: the largest errors, and in words everything that is wrong."""

    max_error: float
    tolerance: float
    lse_error: float
    lse_tolerance: float
    faults: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """No fault was found."""
        return not self.faults

    def require(self, what: str) -> None:
        """Raise VerificationError, naming `what` ran, unless the check passed."""
        if self.faults:
            raise VerificationError(f"{what} is wrong:\n  " + "\n  ".join(self.faults))


def verify(expected: Expected, o: torch.Tensor, lse: torch.Tensor | None, buffers: tuple[Buffer, ...] = ()) -> Check:
    """Compare an output with the exact answer, look for what was not written, and at the canaries of `buffers`."""
    faults = [damage for buffer in buffers if (damage := buffer.damage())]
    max_error = _compare("o", o, expected.o, expected.tolerance, faults)
    lse_error = 0.0 if lse is None else _compare("lse", lse, expected.lse, expected.lse_tolerance, faults)
    return Check(max_error, expected.tolerance, lse_error, expected.lse_tolerance, tuple(faults))


def _compare(name: str, given: torch.Tensor, exact: torch.Tensor, tolerance: float, faults: list[str]) -> float:
    """The largest error; what is wrong is added to `faults`."""
    if missing := unwritten(given):
        faults.append(f"{missing} of {given.numel()} elements of {name} were not written")
    error = (given.to(exact.dtype) - exact).abs()
    error.masked_fill_(given == exact, 0)  # -inf on both sides
    error.nan_to_num_(nan=math.inf)
    index = tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape))
    largest = float(error[index])
    if largest > tolerance:
        faults.append(
            f"{name}{list(index)} is {float(given[index]):.6g} instead of {float(exact[index]):.6g}: "
            f"error {largest:.3g}, tolerance {tolerance:.3g}"
        )
    return largest
