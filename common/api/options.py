"""What a call asks for: by name here, flat in torch's operators, and the problem that it comes to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from flashladder.common.api import sequences, validate
from flashladder.common.catalog import FASTEST
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.expression import Mods
from flashladder.common.problem import dropout
from flashladder.common.problem.config import listing
from flashladder.common.problem.problem import DTYPES, Problem
from flashladder.common.runtime.launch import PROBLEMS_KEPT, SIZES

_problem = lru_cache(PROBLEMS_KEPT, typed=True)(Problem)  # calls that come often are of few
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SCHEMA = {  # of types
    "torch.Tensor": "Tensor",
    "torch.Tensor | None": "Tensor?",
    "tuple[torch.Tensor, ...]": "Tensor[]",
    "int": "SymInt",
    "int | None": "SymInt?",
    "float": "float",
    "float | None": "float?",
    "bool": "bool",
    "str": "str",
}


class Flat:
    """Dataclasses whose fields are arguments of torch's operators, which take no other types."""

    @classmethod
    def schema(cls, **changed: str) -> str:
        """The arguments as torch declares them, in the order of `flat`; the types of some as they are `changed` to."""
        types = {field.name: _SCHEMA[str(field.type)] for field in dataclasses.fields(cls)} | changed  # type: ignore[arg-type]
        return ", ".join(f"{kind} {name}" for name, kind in types.items())

    def flat(self) -> tuple[Any, ...]:
        """The values of all fields, of which the class makes the same again."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Options(Flat):
    """What is asked for beside Q, K and V, as kernels take it; without a change, plain attention.

    With documents, (batch, seqlen_k), int32, on the CPU, a row sees its own document alone, under a causal mask; 0 is
    padding. With cu_seqlens, tensors are those of one sequence: (1, total, heads, head_dim), and the log-sum-exp is
    (heads, total_q). Slopes are (batch, heads), sinks (heads,) and fp32; both contiguous. With a dropout_p there is an
    rng_state. `deterministic` is of the backward pass: the other one always is.
    """

    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    causal: bool = False
    softmax_scale: float | None = None
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    deterministic: bool = False
    dropout_p: float = 0.0
    rng_state: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    version: str = FASTEST

    @property
    def is_plain(self) -> bool:
        """Whether the forward pass of it is the plain operator's."""
        has_tensors = any(x is not None for x in (self.cu_seqlens_q, self.alibi_slopes, self.sinks, self.documents))
        is_open = self.window_left is None and self.window_right is None
        return is_open and not (has_tensors or self.softcap or self.dropout_p)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Those among them, by the names that kernels have for them."""
        named = {name: getattr(self, name) for name in _TENSORS}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def held(self) -> tuple[torch.Tensor | None, ...]:
        """All tensors among them, as `holding` takes them."""
        return tuple([getattr(self, name) for name in _TENSORS])

    def holding(self, held: Sequence[torch.Tensor | None]) -> Options:
        """The same options with other tensors, or without them."""
        nothing: dict[str, Any] = dict(zip(_TENSORS, held, strict=True))
        return dataclasses.replace(self, **nothing)

    @property
    def trained(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors that may have gradients."""
        return (self.sinks,)

    @property
    def in_order(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors that the forward operations have behind Q, K and V."""
        return self.cu_seqlens_q, self.cu_seqlens_k, self.alibi_slopes, self.sinks, self.rng_state

    @property
    def numbers(self) -> tuple[Any, ...]:
        """What is asked for, but for what tensors say."""
        return (
            self.causal,
            self.softmax_scale,
            self.window_left,
            self.window_right,
            self.softcap,
            self.dropout_p,
            self.max_seqlen_q,
            self.max_seqlen_k,
        )

    def longest(self, q: torch.Tensor, k: torch.Tensor) -> tuple[int, int]:
        """No sequence of packed ones has more rows of q and of k. Where one is 0, nobody sees a key."""
        return min(self.max_seqlen_q, q.shape[1]), min(self.max_seqlen_k, k.shape[1])

    def is_blind(self, q: torch.Tensor, k: torch.Tensor) -> bool:
        """Whether sequences are packed, and nobody sees a key."""
        return self.cu_seqlens_q is not None and not (len(self.cu_seqlens_q) > 1 and all(self.longest(q, k)))

    def problem(self, q: torch.Tensor, k: torch.Tensor, **others: Any) -> Problem:
        """That of tensors (batch, seqlen, heads, head_dim); `others` are fields that the options do not say."""
        asked: dict[str, Any] = {"causal": self.causal, "softmax_scale": self.softmax_scale, "softcap": self.softcap}
        asked |= {"window_left": self.window_left, "window_right": self.window_right, "dropout_p": self.dropout_p}
        asked["alibi"] = self.alibi_slopes is not None
        if self.cu_seqlens_q is not None:
            seqlen_q, seqlen_k = self.longest(q, k)
            asked |= {"batch": self.cu_seqlens_q.shape[0] - 1, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
            asked |= {"total_q": max(1, q.shape[1]), "total_k": max(1, k.shape[1])}
        return problem_of(q, k, **asked, **others)

    def validate_sequences(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """UnsupportedProblemError for packed sequences that are not within the tensors."""
        for of, starts, tensor, longest in (
            ("q", self.cu_seqlens_q, q, self.max_seqlen_q),
            ("k", self.cu_seqlens_k, k, self.max_seqlen_k),
        ):
            assert starts is not None
            sequences.validate_bounds(of, starts, tensor.shape[1], longest)

    def forward_problem(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: bool) -> Problem:
        """That of the forward pass."""
        others: dict[str, Any] = {"head_dim_v": v.shape[3], "sinks": self.sinks is not None, "lse": lse}
        if self.cu_seqlens_q is not None:
            others["operation"] = "packed"
        return self.problem(q, k, **others)


@dataclass(frozen=True)
class Modified(Options):
    """The same with a mask and a score by expressions, as `Mods.asked` has them, and the tensors that these read.

    They are contiguous, in the order of their names.
    """

    mods: str = ""
    read: tuple[torch.Tensor, ...] = ()

    @property
    def is_plain(self) -> bool:
        return False

    @property
    def held(self) -> tuple[torch.Tensor | None, ...]:
        return *super().held, *self.read

    def holding(self, held: Sequence[torch.Tensor | None]) -> Modified:
        named: dict[str, Any] = {**dict(zip(_TENSORS, held, strict=False)), "read": tuple(held[len(_TENSORS) :])}
        return dataclasses.replace(self, **named)

    @property
    def trained(self) -> tuple[torch.Tensor | None, ...]:
        return self.sinks, *self.read  # torch.compile reads no property of super()

    def asking(self, wanted: Iterable[bool]) -> Modified:
        """What the backward pass is asked for where gradients of some of the tensors that are read are wanted.

        One that no score grows with has none.
        """
        return dataclasses.replace(self, mods=_asking(self.mods, tuple(wanted)))

    @property
    def asked(self) -> tuple[bool, ...]:
        """Of which of these the gradients are asked for."""
        mods = Mods.parse(self.mods)
        return tuple([each.name in mods.gradients for each in mods.tensors])

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        named = zip(Mods.parse(self.mods).tensors, self.read, strict=True)
        return {**super().tensors, **{each.field: tensor.reshape(-1) for each, tensor in named}}

    def problem(self, q: torch.Tensor, k: torch.Tensor, **others: Any) -> Problem:
        extents = tuple([tuple(tensor.shape) for tensor in self.read])
        return super().problem(q, k, **others, mods=self.mods, extents=extents)


@lru_cache(PROBLEMS_KEPT)
def _asking(spelled: str, wanted: tuple[bool, ...]) -> str:
    mods = Mods.parse(spelled)
    names = [each.name for each, is_wanted in zip(mods.tensors, wanted, strict=True) if is_wanted]
    return dataclasses.replace(mods, gradients=tuple([name for name in names if name in mods.growing])).asked


_TENSORS = tuple(field.name for field in dataclasses.fields(Options) if field.type == "torch.Tensor | None")


def options_of(
    device: torch.device,
    batch: int,
    num_heads: int,
    *,
    causal: bool,
    softmax_scale: float | None,
    window: validate.Window,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    dropout_p: float,
    deterministic: bool,
    version: str,
    **packing: Any,
) -> Options:
    """The arguments of a public function, validated; of so many sequences with so many heads of q, on q's device.

    A random state is drawn where weights are dropped.
    """
    causal = validate.flag("causal", causal)
    left, right = validate.window(window, causal)
    dropout_p = validate.probability("dropout_p", dropout_p)
    return Options(
        **packing,
        causal=causal,
        softmax_scale=validate.scale(softmax_scale),
        window_left=left,
        window_right=right,
        softcap=validate.number("softcap", softcap),
        alibi_slopes=None if alibi_slopes is None else validate.slopes(alibi_slopes, device, batch, num_heads),
        deterministic=validate.flag("deterministic", deterministic),
        dropout_p=dropout_p,
        rng_state=dropout.drawn(device) if dropout_p else None,
        sinks=None if sinks is None else validate.sinks(sinks, device, num_heads),
        version=validate.text("version", version),
    )


def problem_of(q: torch.Tensor, k: torch.Tensor, **others: Any) -> Problem:
    """What tensors (batch, seqlen, heads, head_dim) ask for; `others` are fields that they do not say, or say wrong.

    Of empty tensors, which no kernel computes, the problem has 1 for sizes of 0.
    """
    if q.dtype not in _NAMES:
        raise UnsupportedProblemError(f"q is {q.dtype}; kernels take {listing(_NAMES)}")
    batch, seqlen_q, num_heads, head_dim = q.shape
    sizes: dict[str, Any] = {
        "batch": batch,
        "num_heads": num_heads,
        "num_heads_k": k.shape[2],
        "seqlen_q": seqlen_q,
        "seqlen_k": k.shape[1],
        "head_dim": head_dim,
        "dtype": _NAMES[q.dtype],
    }
    asked: dict[str, Any] = {**sizes, **others}
    return _problem(**{**asked, **{name: max(1, asked[name]) for name in SIZES}})
