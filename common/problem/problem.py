"""A problem, which is one call of an operation; and what an operation says of itself, so that tensors, checks, launches
and tables of every kind are made in one way.

An operation is a file that sets OPERATION: in operations/, or operation.py in the folder of a ladder. It
bears the name of its file or of its ladder, and is found by that.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from types import ModuleType
from typing import Any, ClassVar

import torch

from flashladder.common import plugins
from flashladder.common.errors import ConfigError, UnsupportedProblemError
from flashladder.common.expression import Mods
from flashladder.common.own import FIRST, OPERATION_FILE
from flashladder.common.paths import OPERATIONS
from flashladder.common.problem.buffers import LAYOUTS, OUTPUT, UPDATED, Tensor
from flashladder.common.problem.config import KernelConfig, Value, listing, spelled
from flashladder.common.problem.families import NORMAL
from flashladder.common.problem.head_dims import HEAD_DIM_STEP
from flashladder.common.problem.options import WithOptions

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LSE = "lse"
DETERMINISTIC = "deterministic"  # an option of operations: each run gives the same bits
MAX_SOFTCAP = 1000.0  # kernels' scores are good to 2^-22 of it
SCALES = (2.0**-126, 2.0**127)  # fp32's normal numbers; kernels multiply by log2(e)
_TINY = 1e-5  # added to the tolerance, for outputs that 16-bit torch gets exactly
_CONFIGURED = ("dtype", "head_dim", "head_dim_v", "causal")  # what a configuration and a problem say alike
COMPUTE, BANDWIDTH = "TFLOP/s", "TB/s"  # units of speed
# What only some operations know. The others refuse a problem that has it.
BOUNDS = ("causal", "window_left", "window_right", "softcap", "alibi")  # what a row sees, and how
FEATURES = (*BOUNDS, "sinks", "dropout_p", "mods", "extents")
LENGTHS = ("seqlens_q", "seqlens_k", "total_q", "total_k")


@dataclass(frozen=True)
class Problem:
    """One call. Left at None: num_heads_k = num_heads, seqlen_k = seqlen_q, head_dim_v = head_dim, softmax_scale =
    1/sqrt(head_dim), or what the family of inputs wants.

    Causal masks are aligned to the bottom right: query i sees the keys j <= i + seqlen_k - seqlen_q. A window is, too:
    from window_left keys before that one to window_right behind it, None for all. A softcap of 0 is none; with one,
    scores are softcap * tanh(score / softcap). With alibi, they then lose a slope for each key between a row's own and
    theirs: slope * |i + seqlen_k - seqlen_q - j|, where the slopes are a tensor of their own. With sinks, each head has
    a logit more that joins the sum of its rows, and has no value; they are a tensor too.

    With `mods` an expression says what scores become then, and another one which keys a row sees, of those that it sees
    else; their tensors have the shapes `extents`, by the order of their names.

    With a dropout_p, weights of P are dropped with that probability, in steps of 1/256, and the others grow by
    1 / (1 - p) of the p so rounded; the log-sum-exp is that of all. common/problem/dropout.py says which are dropped.

    Packed sequences have their lengths in seqlens_q and seqlens_k (as seqlens_q where left out). These say how many
    there are (batch), the longest (seqlen_q, seqlen_k) and the rows of all together (total_q, total_k). Where only the
    GPU knows the lengths, these five are given in their place; such a problem has no exact answer.

    What an operation knows beside all that is in `options`, by name, and an attribute too: `problem.page_size`.
    Raises UnsupportedProblemError for values that are no problem of the operation.
    """

    batch: int = 1
    num_heads: int = 1
    num_heads_k: int = None  # type: ignore[assignment]  # set in __post_init__, as the other three
    seqlen_q: int = 256
    seqlen_k: int = None  # type: ignore[assignment]
    head_dim: int = 128  # of Q and K, and of V where head_dim_v is not given
    head_dim_v: int = None  # type: ignore[assignment]
    dtype: str = "bf16"
    causal: bool = False
    softmax_scale: float = None  # type: ignore[assignment]
    seed: int = 0
    layout: str = "bshd"
    family: str = NORMAL  # of inputs: one of the operation's
    operation: str = FIRST
    lse: bool = True  # the log-sum-exp is asked for, where it is among the operation's outputs
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    dropout_p: float = 0.0
    mods: str = ""  # a mask and a score that are expressions (common/expression/mods.py), and the shapes of its tensors
    extents: tuple[tuple[int, ...], ...] = ()
    seqlens_q: tuple[int, ...] = ()  # these four of packed sequences alone
    seqlens_k: tuple[int, ...] = ()
    total_q: int = None  # type: ignore[assignment]
    total_k: int = None  # type: ignore[assignment]
    options: tuple[tuple[str, Value], ...] = ()  # the operation's own; given as a mapping, or as pairs

    def __post_init__(self) -> None:
        kind = operation_named(self.operation)
        self._set(options=kind.complete(dict(self.options)))
        for name in ("seqlens_q", "seqlens_k"):
            self._set(**{name: tuple(getattr(self, name))})  # JSON has no tuples
        self._set(extents=tuple(map(tuple, self.extents)))
        self._refuse_unknown_to(kind)
        self._set(**kind.implied(self))
        for name in ("batch", "num_heads", "seqlen_q", "head_dim"):
            self._require_positive(name)
        for name, known in (("dtype", DTYPES), ("layout", kind.layouts), ("family", kind.families_of(self))):
            self._require_known(name, known)
        scale = kind.default_scale(self)
        defaults = {"num_heads_k": self.num_heads, "seqlen_k": self.seqlen_q, "head_dim_v": self.head_dim}
        for name, value in {**defaults, "softmax_scale": scale}.items():
            if getattr(self, name) is None:
                self._set(**{name: value})
        for name in defaults:
            self._require_positive(name)
        self._check_scale()
        if self.num_heads % self.num_heads_k:
            raise UnsupportedProblemError(
                f"num_heads={self.num_heads} must be a multiple of num_heads_k={self.num_heads_k}"
            )
        self._check_bounds()
        if not self.lse and not (LSE in self.tensors and self.tensors[LSE].optional):
            raise UnsupportedProblemError(
                f"lse=false: the log-sum-exp is no output of the operation {self.operation} that could be left out"
            )
        kind.check(self)

    @classmethod
    def of_config(cls, operation: str, config: KernelConfig, **sizes: int) -> Problem:
        """A problem that a kernel so configured computes: what the configuration does not say is as usual.

        What expressions read by a position lies within its tensor.
        """
        kind, decided = operation_named(operation), config.as_dict()
        same: dict[str, Any] = {name: decided[name] for name in _CONFIGURED if name in decided}
        if decided.get("narrower"):
            same["head_dim"] -= HEAD_DIM_STEP
        options = {option.name: decided[option.name] for option in kind.options if option.name in decided}
        found = cls(**{**sizes, **same}, operation=operation, options=tuple(options.items()))
        if not (mods := str(decided.get("mods", ""))):
            return found
        most = max(found.batch, found.num_heads, found.seqlen_q, found.seqlen_k)
        extents = tuple((most,) * tensor.rank for tensor in Mods.parse(mods).tensors)
        return replace(found, mods=mods, extents=extents)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            for option, value in self.options:
                if option == name:
                    return value
        raise AttributeError(f"the problem has no {name}")

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _refuse_unknown_to(self, kind: Operation) -> None:
        """What only other operations know."""
        usual = {field.name: field.default for field in fields(self)}
        given = [name for name in (*FEATURES, *LENGTHS) if getattr(self, name) != usual[name]]
        if foreign := [name for name in given if name not in kind.features]:
            raise UnsupportedProblemError(f"the operation {self.operation} knows no {listing(foreign)}")

    def _check_scale(self) -> None:
        if not 0 < self.softmax_scale < math.inf:  # kernels take a row's maximum before they scale
            raise UnsupportedProblemError(f"softmax_scale={self.softmax_scale}: must be a positive, finite number")
        if not SCALES[0] <= self.softmax_scale <= SCALES[1]:
            low, high = (f"{limit:.2g}" for limit in SCALES)
            raise UnsupportedProblemError(
                f"softmax_scale={self.softmax_scale}: kernels hold it in fp32, which takes {low} to {high}"
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

        if not 0 <= self.dropout_p < 1:
            raise UnsupportedProblemError(f"dropout_p={self.dropout_p}: must be at least 0 and less than 1")

    def _require_known(self, name: str, known: Collection[str]) -> None:
        if getattr(self, name) not in known:
            raise UnsupportedProblemError(f"{name}={getattr(self, name)}: must be one of {', '.join(known)}")

    def _require_positive(self, name: str) -> None:
        if getattr(self, name) < 1:
            raise UnsupportedProblemError(f"{name}={getattr(self, name)}: must be at least 1")

    @property
    def asked(self) -> Operation:
        """What is to be computed."""
        return operation_named(self.operation)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All its tensors, in the order in which kernels get them: inputs, then outputs."""
        return self.asked.tensors(self)

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Those that kernels read."""
        return tuple(name for name, tensor in self.tensors.items() if tensor.role != OUTPUT)

    @cached_property
    def updated(self) -> tuple[str, ...]:
        """The inputs that kernels write to in place."""
        return tuple(name for name, tensor in self.tensors.items() if tensor.role == UPDATED)

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """The outputs that are asked for."""
        return tuple(name for name, each in self.tensors.items() if each.role == OUTPUT and not each.optional)

    @property
    def window(self) -> bool:
        """Whether a row sees no key that is too far away."""
        return self.window_left is not None or self.window_right is not None

    @property
    def packed(self) -> bool:
        """Whether its sequences lie one behind the other."""
        return self.total_q is not None

    @property
    def set_options(self) -> dict[str, Value]:
        """The options of the operation that are not at their defaults."""
        return {name: value for name, value in self.options if value != self.asked.option(name).default}

    @property
    def flops(self) -> float:
        """The operations of its matrix products."""
        return self.asked.flops(self)

    def rate(self, time_us: float) -> float:
        """How much is done in a second, where it takes so long: in the operation's unit."""
        asked = self.asked
        return (asked.bytes_moved(self) if asked.unit == BANDWIDTH else asked.flops(self)) / time_us / 1e6

    @property
    def name(self) -> str:
        """The shape, and what differs from the defaults ('batch=4,num_heads=16,...,causal=true')."""
        always = ("batch", "num_heads", "seqlen_q", "head_dim", "dtype")
        follows = {"num_heads_k": self.num_heads, "seqlen_k": self.seqlen_q, "head_dim_v": self.head_dim}
        plain = {field.name: field.default for field in fields(self)} | follows
        plain |= {"softmax_scale": float(self.head_dim**-0.5), "options": self.options}
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        shown = {name: value for name, value in values.items() if name in always or value != plain[name]}
        return spelled(shown | self.set_options)


class Operation(WithOptions, ABC):
    """What is computed of which tensors."""

    features: ClassVar[tuple[str, ...]] = ()  # of FEATURES and LENGTHS, what a problem may have
    sizes: ClassVar[tuple[str, ...]] = ()  # whole numbers that kernels are told beside those of every operation
    families: ClassVar[Collection[str]] = (NORMAL,)  # of inputs
    layouts: ClassVar[tuple[str, ...]] = LAYOUTS
    # Groups whose columns may change their signs, those of one group alike, where nothing else changes. The first of a
    # group is an input and has most columns.
    signed_together: ClassVar[tuple[tuple[str, ...], ...]]
    gone_through: ClassVar[str] = "seqlen_k"  # the length that a CTA goes through, block by block
    unit: ClassVar[str] = COMPUTE  # what tables tell of its speed
    lse_without_keys: ClassVar[float] = -math.inf  # the log-sum-exp of a row that sees none
    # The sizes of a problem where nobody gives any.
    usual: ClassVar[Mapping[str, Any]] = {"batch": 4, "num_heads": 16, "seqlen_q": 4096}  # a published benchmark's
    sampled: ClassVar[Mapping[str, Any]] = {"batch": 2, "num_heads": 16, "seqlen_q": 1024}  # fills a large GPU
    small: ClassVar[Mapping[str, Any]] = {"batch": 1, "num_heads": 2, "seqlen_q": 256}  # a second on the emulator

    @abstractmethod
    def flops(self, problem: Problem) -> float:
        """The operations of its matrix products, as the field counts them."""

    @abstractmethod
    def tensors(self, problem: Problem) -> dict[str, Tensor]:
        """All of a problem's tensors, by name, in the order in which kernels get them: inputs, then outputs."""

    @abstractmethod
    def compute(
        self, problem: Problem, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """The outputs by the textbook, with every intermediate in `dtype`: fp64 makes them exact."""

    def implied(self, problem: Problem) -> dict[str, Any]:
        """Fields of a problem that follow from others, before defaults are filled in and anything is checked."""
        return {}

    def check(self, problem: Problem) -> None:
        """Raises UnsupportedProblemError for what every operation would take, but this one."""

    def families_of(self, problem: Problem) -> Collection[str]:
        """Those of its families that a problem may have."""
        return self.families

    def sized(self, sizes: Mapping[str, Any], options: Mapping[str, Value]) -> dict[str, Any]:
        """The sizes of a problem with these options, where nobody gives its rows: `usual` ones, perhaps others."""
        return dict(sizes)

    def of_length(self, seqlen: int, tokens: int) -> dict[str, Any]:
        """The sizes of a problem in a row of benchmarks that are told by a length, with so many tokens in all."""
        return {"batch": max(1, tokens // seqlen), "seqlen_q": seqlen}

    def of_rows(self, rows: int, heads: int) -> dict[str, Any]:
        """The sizes of a problem in a study of errors: rows of Q for each head of K and V."""
        return {"num_heads": heads, "seqlen_q": rows}

    def one_sequence(self, problem: Problem) -> Problem:
        """The problem of one sequence alone, whose tensors are no larger than that takes."""
        return replace(problem, batch=1)

    def bytes_moved(self, problem: Problem) -> float:
        """What a kernel must read and write at least: each tensor once."""
        needed = (tensor for tensor in problem.tensors.values() if not tensor.optional)
        return float(sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in needed))

    def row_tiles(self, problem: Problem, block_m: int) -> int:
        """Tiles of rows, over all heads and sequences."""
        return problem.batch * problem.num_heads * math.ceil(problem.seqlen_q / block_m)

    def blocks(self, problem: Problem, block_m: int, block_n: int) -> float:
        """Blocks of keys that a tile of rows goes through, on average."""
        p = problem
        rows = p.batch * p.num_heads * p.seqlen_q
        return self.flops(p) / rows / self.block_flops(1, block_n, p.head_dim, p.head_dim_v)

    def block_flops(self, block_m: int, block_n: int, head_dim: int, head_dim_v: int) -> int:
        """The operations of the matrix products of a tile of rows and one block of keys."""
        return 2 * block_m * block_n * (head_dim + head_dim_v)

    def argument(self, problem: Problem, name: str) -> Any:
        """The number that kernels are given under this name."""
        return getattr(problem, name)

    def default_scale(self, problem: Problem) -> float:
        """The softmax_scale of a problem that was given none."""
        return float(problem.head_dim**-0.5)

    def draw(self, problem: Problem, tensors: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
        """Fills the inputs with those of the problem's family: standard normal, in their order."""
        for name in problem.inputs:
            tensor = tensors[name]
            tensor.copy_(torch.randn(tensor.shape, generator=generator, device=generator.device))

    def settle(self, problem: Problem, tensors: Mapping[str, torch.Tensor]) -> None:
        """Computes the inputs that follow from others, where these were drawn or changed."""

    def tolerance(self, problem: Problem, name: str, exact: torch.Tensor, rounded: torch.Tensor) -> float:
        """How far a kernel's output may be from the exact one: twice as far as 16-bit torch is (FlashAttention's rule).

        Where 16-bit torch has elements that are NaN or infinite, the others say little: two units in the last place of
        the largest output are allowed then. What is fp32 may be as far as fp32 arithmetic goes.
        """
        if problem.tensors[name].dtype != torch.float32:
            unit = 0.0 if rounded.isfinite().all() else torch.finfo(rounded.dtype).eps
            return 2 * max(largest(rounded - exact), unit * largest(exact)) + _TINY
        return 1e-5 * (1 + largest(exact))


def largest(x: torch.Tensor) -> float:
    """The largest magnitude of what is finite, or 0."""
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def operation_named(name: str) -> Operation:
    """An operation; UnsupportedProblemError lists those there are."""
    if module := plugins.named(name, OPERATIONS, OPERATION_FILE):
        return _declared(module, name)
    raise UnsupportedProblemError(f"operation={name}: must be one of {', '.join(operation_names())}")


def operation_names() -> list[str]:
    """Those that can be asked for."""
    return plugins.names(OPERATIONS, OPERATION_FILE)


@cache
def _declared(module: ModuleType, name: str) -> Operation:
    """The operation that a file declares; ConfigError where that is none of its name."""
    found = getattr(module, "OPERATION", None)
    if not isinstance(found, Operation) or found.name != name:
        raise ConfigError(f"{module.__file__}: sets no OPERATION that is called {name}, as the file or its ladder is")
    if taken := [option.name for option in found.options if hasattr(Problem, option.name)]:
        raise ConfigError(f"{module.__file__}: {listing(taken)}: every problem has that, so it is no option of one")
    return found
