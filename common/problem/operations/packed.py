"""Forward attention of packed sequences: they lie one behind the other, each as long as it is, without padding."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from flashladder.common.problem.buffers import View, contiguous
from flashladder.common.problem.families import NORMAL
from flashladder.common.problem.operations.forward import FORWARD, Forward, attention

if TYPE_CHECKING:
    from flashladder.common.problem.problem import Problem


class Packed(Forward):
    """As flash-attn's varlen functions have it, but that tensors are a batch of one, so that all have four dimensions.

    q and o are (1, total_q, num_heads, head_dim), k and v (1, total_k, num_heads_k, head_dim); lse is
    (num_heads, total_q), fp32. Sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q, and likewise of k
    and v; both are (batch + 1), int32. A sequence may have no rows, or rows and no keys: their O is 0, lse -inf.
    """

    name = "packed"
    inputs: ClassVar[tuple[str, ...]] = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    families = (NORMAL,)
    sizes = ("total_q", "total_k")

    def flops(self, problem: Problem) -> float:
        """The sum over its sequences."""
        return sum(FORWARD.flops(alone) for *_, alone in _parts(problem))

    def views(self, problem: Problem) -> list[dict[str, View]]:
        """As of one sequence with all rows."""
        p = problem
        *views, _ = super().views(_one_sequence(p, p.total_q, p.total_k, p.layout))
        starts = [{f"cu_seqlens_{x}": contiguous(p.batch + 1)} for x in "qk"]
        return [*views, *starts, {"lse": contiguous(p.num_heads, p.total_q)}]

    def dtype(self, problem: Problem, name: str) -> torch.dtype:
        """int32 of what says where sequences begin."""
        return torch.int32 if name.startswith("cu_seqlens") else super().dtype(problem, name)

    def draw(self, problem: Problem, tensors: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
        """Standard normal ones, and the lengths of the problem."""
        for name in "qkv":
            tensor = tensors[name]
            tensor.copy_(torch.randn(tensor.shape, generator=generator, device=generator.device))
        for name, seqlens in (("cu_seqlens_q", problem.seqlens_q), ("cu_seqlens_k", problem.seqlens_k)):
            tensors[name].copy_(torch.tensor([0, *itertools.accumulate(seqlens)], dtype=torch.int32))

    def compute(
        self, problem: Problem, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Each sequence as `attention` computes it."""
        q = tensors["q"]
        o = torch.zeros(q.shape, dtype=dtype, device=q.device)
        lse = torch.full((problem.num_heads, problem.total_q), -math.inf, dtype=dtype, device=q.device)
        for number, rows, keys, alone in _parts(problem):
            parts = {name: tensors[name][:, rows if name == "q" else keys] for name in "qkv"}
            if problem.alibi:
                parts["alibi_slopes"] = tensors["alibi_slopes"][number : number + 1]
            o[:, rows], (lse[:, rows],) = attention(alone, parts, dtype)
        return {"o": o, "lse": lse}


PACKED = Packed()


class _Part(NamedTuple):
    number: int
    rows: slice
    keys: slice
    alone: Problem


def _one_sequence(problem: Problem, seqlen_q: int, seqlen_k: int, layout: str = "bshd") -> Problem:
    """A problem that is not packed, of the same heads."""
    return dataclasses.replace(
        problem,
        operation="forward",
        batch=1,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        layout=layout,
        seqlens_q=(),
        seqlens_k=(),
        total_q=None,  # type: ignore[arg-type]  # of packed sequences alone
        total_k=None,  # type: ignore[arg-type]
    )


def _parts(problem: Problem) -> Iterator[_Part]:
    """The sequences that have rows and keys, each as a problem of its own."""
    q = k = 0
    for number, (seqlen_q, seqlen_k) in enumerate(zip(problem.seqlens_q, problem.seqlens_k, strict=True)):
        if seqlen_q and seqlen_k:
            alone = _one_sequence(problem, seqlen_q, seqlen_k)
            yield _Part(number, slice(q, q + seqlen_q), slice(k, k + seqlen_k), alone)
        q, k = q + seqlen_q, k + seqlen_k
