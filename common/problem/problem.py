"""A problem: what is asked for, seeded inputs in guarded memory, the exact answer, and the verdict on an output."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields

import numpy as np
import torch

from flashladder.common.errors import UnsupportedProblemError, VerificationError
from flashladder.common.problem.buffers import Buffer, poison, unwritten
from flashladder.common.problem.config import listing, spell
from flashladder.common.problem.families import NORMAL
from flashladder.common.problem.operations import BIASED, OPERATIONS, Operation
from flashladder.common.problem.operations.operation import DTYPES

LSE = "lse"
LAYOUTS = ("bshd", "bhsd", "padded", "qkv")
_CPU_DRAW_LIMIT = 2**25  # elements: larger inputs are drawn on the GPU they are for
_FP64_LIMIT = 2**36  # FLOPs: larger exact answers are computed in fp32 where there is a GPU
MAX_SOFTCAP = 1000.0  # kernels' scores are good to 2^-22 of it
SCALES = (2.0**-126, 2.0**127)  # fp32's normal numbers; kernels multiply by log2(e)


@dataclass(frozen=True)
class Problem:
    """One attention call. Left at None: num_heads_k = num_heads, seqlen_k = seqlen_q, softmax_scale = 1/sqrt(head_dim),
    or what the family of inputs wants.

    Causal masks are aligned to the bottom right: query i sees the keys j <= i + seqlen_k - seqlen_q. A window is, too:
    from window_left keys before that one to window_right behind it, None for all. A softcap of 0 is none; with one,
    scores are softcap * tanh(score / softcap). With alibi, they then lose a slope for each key between a row's own and
    theirs: slope * |i + seqlen_k - seqlen_q - j|, where the slopes are a tensor of their own.

    Packed sequences have their lengths in seqlens_q and seqlens_k (as seqlens_q where left out). These say how many
    there are (batch), the longest (seqlen_q, seqlen_k) and the rows of all together (total_q, total_k). Where only the
    GPU knows the lengths, these five are given in their place; such a problem has no exact answer.
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
    family: str = NORMAL  # of inputs: one of the operation's
    operation: str = "forward"
    lse: bool = True  # the log-sum-exp is asked for, where it is among the operation's outputs
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    alibi: bool = False
    seqlens_q: tuple[int, ...] = ()  # these four of packed sequences alone
    seqlens_k: tuple[int, ...] = ()
    total_q: int = None  # type: ignore[assignment]
    total_k: int = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self._check_packing()
        for name in ("batch", "num_heads", "seqlen_q", "head_dim"):
            self._require_positive(name)
        for name, known in (("dtype", DTYPES), ("layout", LAYOUTS), ("operation", OPERATIONS)):
            self._require_known(name, known)
        self._require_known("family", self.asked.families)
        if not self.lse and LSE not in self.asked.outputs:
            raise UnsupportedProblemError(
                f"lse=false: the log-sum-exp is no output of the operation {self.operation} that could be left out"
            )
        scale = self.asked.default_scale(self)
        defaults = {"num_heads_k": self.num_heads, "seqlen_k": self.seqlen_q, "softmax_scale": scale}
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name in ("num_heads_k", "seqlen_k"):
            self._require_positive(name)
        if not 0 < self.softmax_scale < math.inf:  # kernels take a row's maximum before they scale
            raise UnsupportedProblemError(f"softmax_scale={self.softmax_scale}: must be a positive, finite number")
        if not SCALES[0] <= self.softmax_scale <= SCALES[1]:
            low, high = (f"{limit:.2g}" for limit in SCALES)
            raise UnsupportedProblemError(
                f"softmax_scale={self.softmax_scale}: kernels hold it in fp32, which takes {low} to {high}"
            )
        if self.num_heads % self.num_heads_k:
            raise UnsupportedProblemError(
                f"num_heads={self.num_heads} must be a multiple of num_heads_k={self.num_heads_k}"
            )
        self._check_bounds()
        rows = ("total_q", "total_k") if self.packed else ("seqlen_q", "seqlen_k")
        q, k = (getattr(self, name) for name in rows)
        if self.layout == "qkv" and q != k:
            raise UnsupportedProblemError(
                f"layout=qkv packs q, k and v row by row: {rows[0]}={q} must equal {rows[1]}={k}"
            )

    def _check_bounds(self) -> None:
        """Of distances and of scores."""
        for name in ("window_left", "window_right"):
            keys = getattr(self, name)
            if keys is not None and (type(keys) is not int or keys < 0):
                raise UnsupportedProblemError(f"{name}={keys}: must be an integer of at least 0, or None for all keys")
        if self.causal and self.window_right is not None:
            raise UnsupportedProblemError(
                f"window_right={self.window_right}: with causal=true no row sees a later key; leave it at None"
            )
        if self.softcap and not SCALES[0] <= self.softcap <= MAX_SOFTCAP:
            raise UnsupportedProblemError(
                f"softcap={self.softcap}: must be a positive number up to {MAX_SOFTCAP:g}, or 0 for none"
            )

    def _check_packing(self) -> None:
        """What packed sequences have, and others do not."""
        for name in ("seqlens_q", "seqlens_k"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # JSON has no tuples
        packing = {name: getattr(self, name) for name in ("seqlens_q", "seqlens_k", "total_q", "total_k")}
        if not self.packed:
            if given := [name for name, value in packing.items() if value]:
                raise UnsupportedProblemError(f"{listing(given)}: of the operation packed, not of {self.operation}")
            return
        if not self.seqlens_q and self.total_q is None:
            raise UnsupportedProblemError("packed sequences have lengths: seqlens_q=(3, 0, 5), or their sum, total_q=8")
        if self.seqlens_q:
            self._set_lengths()
        for name in ("total_q", "total_k"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.total_q)
            self._require_positive(name)

    def _set_lengths(self) -> None:
        """What the lengths of packed sequences say."""
        seqlens_k = self.seqlens_k or self.seqlens_q
        if len(self.seqlens_q) != len(seqlens_k):
            raise UnsupportedProblemError(f"seqlens_q are {len(self.seqlens_q)}, seqlens_k {len(seqlens_k)} lengths")
        for name, seqlens in (("q", self.seqlens_q), ("k", seqlens_k)):
            if min(seqlens) < 0:
                raise UnsupportedProblemError(f"seqlens_{name}={seqlens}: no sequence is shorter than 0")
            said = {"seqlens": seqlens, "total": sum(seqlens), "seqlen": max(1, *seqlens)}
            for size, value in said.items():
                object.__setattr__(self, f"{size}_{name}", value)
        object.__setattr__(self, "batch", len(seqlens_k))

    def _require_known(self, name: str, known: Collection[str]) -> None:
        if getattr(self, name) not in known:
            raise UnsupportedProblemError(f"{name}={getattr(self, name)}: must be one of {', '.join(known)}")

    def _require_positive(self, name: str) -> None:
        if getattr(self, name) < 1:
            raise UnsupportedProblemError(f"{name}={getattr(self, name)}: must be at least 1")

    @property
    def asked(self) -> Operation:
        """What is to be computed."""
        return (BIASED if self.alibi else OPERATIONS)[self.operation]

    @property
    def window(self) -> bool:
        """Whether a row sees no key that is too far away."""
        return self.window_left is not None or self.window_right is not None

    @property
    def packed(self) -> bool:
        """Whether its sequences lie one behind the other."""
        return self.operation == "packed"

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs that are asked for, in the operation's order."""
        return tuple(name for name in self.asked.outputs if self.lse or name != LSE)

    @property
    def flops(self) -> float:
        """The operations of its matrix products."""
        return self.asked.flops(self)

    @property
    def name(self) -> str:
        """The shape, and what differs from the defaults ('batch=4,num_heads=16,...,causal=true')."""
        always = ("batch", "num_heads", "seqlen_q", "head_dim", "dtype")
        plain = Problem(num_heads=self.num_heads, seqlen_q=self.seqlen_q, head_dim=self.head_dim)
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        shown = {name: value for name, value in values.items() if name in always or value != getattr(plain, name)}
        return ",".join(f"{name}={spell(value)}" for name, value in shown.items())


@dataclass(frozen=True)
class Tensors:
    """Inputs and outputs of one problem, each an attribute: `tensors.q`. An output may be left out."""

    by_name: Mapping[str, torch.Tensor]
    operation: Operation = OPERATIONS["forward"]
    buffers: tuple[Buffer, ...] = ()

    def __getattr__(self, name: str) -> torch.Tensor:
        if name in (tensors := self.__dict__.get("by_name", {})):
            return tensors[name]
        raise AttributeError(f"the operation has no tensor {name}")

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """The outputs by their names."""
        return {name: self.by_name[name] for name in self.operation.outputs if name in self.by_name}

    @property
    def device(self) -> torch.device:
        """Where the first input is."""
        return self.by_name[self.operation.inputs[0]].device

    def poison(self) -> None:
        """Fill the outputs with a NaN; to be called before each run that is verified."""
        for output in self.outputs.values():
            poison(output)


def make_inputs(problem: Problem, device: torch.device | str = "cpu") -> Tensors:
    """Inputs of the problem's family for its seed, in its layout, and poisoned outputs, all in guarded memory.

    One seed gives the same numbers in every layout and, up to 2^25 elements, on every device.
    """
    tensors = allocate(problem, device)
    large = sum(tensors.by_name[name].numel() for name in problem.asked.inputs) > _CPU_DRAW_LIMIT
    draw(problem, tensors.by_name, device if large else "cpu")
    return tensors


def allocate(problem: Problem, device: torch.device | str = "cpu") -> Tensors:
    """The same with inputs that are still to be drawn."""
    asked = problem.asked
    wanted = {*asked.inputs, *problem.outputs}
    together = [views for views in asked.views(problem) if wanted.issuperset(views)]
    buffers = [Buffer(views, asked.dtype(problem, next(iter(views))), device) for views in together]
    views = {name: view for buffer in buffers for name, view in buffer.views.items()}
    tensors = Tensors(views, asked, tuple(buffers))
    tensors.poison()
    return tensors


def draw(problem: Problem, tensors: Mapping[str, torch.Tensor], device: torch.device | str = "cpu") -> None:
    """Fills the inputs among the tensors with those of the problem, whose numbers are drawn on the device."""
    problem.asked.draw(problem, tensors, torch.Generator(device=device).manual_seed(problem.seed))


@dataclass(frozen=True)
class Expected:
    """The exact outputs that are asked for, and how far a kernel may be from each."""

    exact: dict[str, torch.Tensor]
    tolerances: dict[str, float]


def expect(problem: Problem, tensors: Tensors) -> Expected:
    """The exact answer, in fp64 (fp32 for large problems on a GPU), and the operation's tolerances."""
    large = tensors.device.type == "cuda" and problem.flops > _FP64_LIMIT
    computed = problem.asked.compute(problem, tensors.by_name, torch.float32 if large else torch.float64)
    exact = {name: computed[name] for name in problem.outputs}
    rounded = problem.asked.compute(problem, tensors.by_name, DTYPES[problem.dtype])
    return Expected(exact, {name: problem.asked.tolerance(name, exact[name], rounded[name]) for name in exact})


@dataclass(frozen=True)
class Check:
    """The verdict on one run: the largest errors, and in words everything that is wrong.

    The error is that of the output which comes nearest to its tolerance; lse has one of its own, or 0.
    """

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


def verify(expected: Expected, outputs: Mapping[str, torch.Tensor], buffers: tuple[Buffer, ...] = ()) -> Check:
    """Compare outputs with the reference, look for what was not written, and at the canaries of `buffers`.

    Outputs that were left out are not compared.
    """
    faults = [damage for buffer in buffers if (damage := buffer.damage())]
    errors = {
        name: _compare(name, output, expected.exact[name], expected.tolerances[name], faults)
        for name, output in outputs.items()
    }
    main = max((name for name in errors if name != LSE), key=lambda name: errors[name] / expected.tolerances[name])
    lse_tolerance = expected.tolerances.get(LSE, 0.0)
    return Check(errors[main], expected.tolerances[main], errors.get(LSE, 0.0), lse_tolerance, tuple(faults))


def _compare(name: str, given: torch.Tensor, exact: torch.Tensor, tolerance: float, faults: list[str]) -> float:
    """The largest error; what is wrong is added to `faults`."""
    if missing := unwritten(given):
        faults.append(f"{missing} of {given.numel()} elements of {name} were not written")
    error = (given.to(exact.dtype) - exact).abs()
    error.masked_fill_(given == exact, 0)  # -inf on both sides
    error.nan_to_num_(nan=math.inf, posinf=math.inf)
    index = tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape))
    largest = float(error[index])
    if largest > tolerance:
        faults.append(
            f"{name}{list(index)} is {float(given[index]):.6g} instead of {float(exact[index]):.6g}: "
            f"error {largest:.3g}, tolerance {tolerance:.3g}"
        )
    return largest
