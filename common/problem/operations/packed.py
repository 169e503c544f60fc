"""Forward attention of packed sequences: they lie one behind the other, each as long as it is, without padding."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.expression import Mods
from flashladder.common.problem.buffers import Tensor, contiguous
from flashladder.common.problem.dropout import RNG_STATE
from flashladder.common.problem.families import NORMAL
from flashladder.common.problem.operations import forward
from flashladder.common.problem.operations.forward import SINKS, SLOPES, Forward, attention, lse_of
from flashladder.common.problem.problem import FEATURES, LENGTHS, LSE, Problem

STARTS = ("cu_seqlens_q", "cu_seqlens_k")


class Packed(Forward):
    """As flash-attn's varlen functions have it, but that tensors are a batch of one, so that all have four dimensions.

    q and o are (1, total_q, num_heads, head_dim), k and v (1, total_k, num_heads_k, head_dim); lse is
    (num_heads, total_q), fp32. Sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q, and likewise of k
    and v; both are (batch + 1), int32. A sequence may have no rows, or rows and no keys: their O is 0, lse -inf or the
    sink.
    """

    name = "packed"
    features = (*FEATURES, *LENGTHS)
    families = (NORMAL,)
    sizes = ("total_q", "total_k")

    def implied(self, problem: Problem) -> dict[str, Any]:
        """The number of sequences, the longest and all rows, from the lengths; rows of K as of Q."""
        if not problem.seqlens_q and problem.total_q is None:
            raise UnsupportedProblemError("packed sequences have lengths: seqlens_q=(3, 0, 5), or their sum, total_q=8")
        found = _of_lengths(problem) if problem.seqlens_q else {}
        for name in ("total_q", "total_k"):
            rows = found.setdefault(name, getattr(problem, name))
            if rows is None:
                rows = found[name] = found["total_q"]
            if rows < 1:
                raise UnsupportedProblemError(f"{name}={rows}: must be at least 1")
        return super().implied(problem) | found

    def flops(self, problem: Problem) -> float:
        """The sum over its sequences."""
        return sum(forward.OPERATION.flops(alone) for *_, alone in parts(problem))

    def tensors(self, problem: Problem) -> dict[str, Tensor]:
        """As of one sequence with all rows, and where each begins."""
        found = super().tensors(problem)
        rows = {name: found.pop(name) for name in "qkv"}
        starts = dict.fromkeys(STARTS, Tensor(contiguous(problem.batch + 1), torch.int32))
        return {**rows, **starts, **found, LSE: lse_of(problem, problem.num_heads, problem.total_q)}

    def _rows(self, problem: Problem) -> tuple[int, int, int]:
        return 1, problem.total_q, problem.total_k

    def draw(self, problem: Problem, tensors: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
        """Standard normal ones, and the lengths of the problem."""
        super().draw(problem, tensors, generator)
        for name, seqlens in zip(STARTS, (problem.seqlens_q, problem.seqlens_k), strict=True):
            tensors[name].copy_(torch.tensor([0, *itertools.accumulate(seqlens)], dtype=torch.int32))

    def _design(
        self, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator
    ) -> None:
        for tensor in (q, k, v):
            tensor.copy_(torch.randn(tensor.shape, generator=generator, device=generator.device))

    def compute(
        self, problem: Problem, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Each sequence as `attention` computes it."""
        p, device = problem, tensors["q"].device
        o = torch.zeros((1, p.total_q, p.num_heads, p.head_dim_v), dtype=dtype, device=device)
        lse = torch.full((p.num_heads, p.total_q), -math.inf, dtype=dtype, device=device)
        if p.sinks:
            lse.copy_(tensors[SINKS][:, None])
        for number, rows, keys, alone in parts(p):
            given = {name: tensors[name][:, rows if name == "q" else keys] for name in "qkv"}
            given |= of_sequence(p, tensors, number)
            o[:, rows], (lse[:, rows],) = attention(alone, given, dtype, number)
        return {"o": o, "lse": lse}


OPERATION = Packed()


def _of_lengths(problem: Problem) -> dict[str, Any]:
    """What the lengths of the sequences say."""
    found: dict[str, Any] = {"batch": len(problem.seqlens_q)}
    seqlens_k = problem.seqlens_k or problem.seqlens_q
    if len(problem.seqlens_q) != len(seqlens_k):
        raise UnsupportedProblemError(f"seqlens_q are {len(problem.seqlens_q)}, seqlens_k {len(seqlens_k)} lengths")
    for name, seqlens in (("q", problem.seqlens_q), ("k", seqlens_k)):
        if min(seqlens) < 0:
            raise UnsupportedProblemError(f"seqlens_{name}={seqlens}: no sequence is shorter than 0")
        said = {"seqlens": seqlens, "total": sum(seqlens), "seqlen": max(1, *seqlens)}
        found |= {f"{size}_{name}": value for size, value in said.items()}
    return found


class Part(NamedTuple):
    """A sequence: its number, its rows of Q, its keys, and the problem that it is."""

    number: int
    rows: slice
    keys: slice
    alone: Problem


def one_sequence(problem: Problem, seqlen_q: int, seqlen_k: int, layout: str = "bshd") -> Problem:
    """A problem that is not packed, of the same heads."""
    return dataclasses.replace(
        problem,
        operation=forward.OPERATION.name,
        batch=1,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        layout=layout,
        seqlens_q=(),
        seqlens_k=(),
        total_q=None,  # type: ignore[arg-type]  # of packed sequences alone
        total_k=None,  # type: ignore[arg-type]
        options=(),
    )


def of_sequence(problem: Problem, tensors: Mapping[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    """What a sequence is given beside its rows: its slopes, and the sinks, the random state and what expressions read
    of all."""
    slopes = {SLOPES: tensors[SLOPES][number : number + 1]} if problem.alibi else {}
    of_all = (SINKS, RNG_STATE, *(tensor.field for tensor in Mods.parse(problem.mods).tensors))
    return slopes | {name: tensors[name] for name in of_all if name in tensors}


def parts(problem: Problem) -> Iterator[Part]:
    """The sequences that have rows and keys, each as a problem of its own."""
    q = k = 0
    for number, (seqlen_q, seqlen_k) in enumerate(zip(problem.seqlens_q, problem.seqlens_k, strict=True)):
        if seqlen_q and seqlen_k:
            alone = one_sequence(problem, seqlen_q, seqlen_k)
            yield Part(number, slice(q, q + seqlen_q), slice(k, k + seqlen_k), alone)
        q, k = q + seqlen_q, k + seqlen_k
