"""Memory for what a call gives: O and the log-sum-exp. Also of tensors that have none, which torch compiles with."""

from __future__ import annotations

import torch

from flashladder.common.problem.problem import LSE, Problem


def new_outputs(problem: Problem, q: torch.Tensor, o: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """For what a call gives, by name: O, or the `o` that is given, and the log-sum-exp if the problem asks for it."""
    found = {"o": new_o(q, problem.head_dim_v) if o is None else o}
    if problem.lse:
        found[LSE] = new_lse(q, problem.packed)
    return found


def new_o(q: torch.Tensor, head_dim_v: int | None = None) -> torch.Tensor:
    """For O: like q, contiguous, with as many columns as V has if that is given."""
    if head_dim_v in (None, q.shape[-1]):
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    return q.new_empty((*q.shape[:-1], head_dim_v))


def new_lse(q: torch.Tensor, packed: bool = False) -> torch.Tensor:
    """For the log-sum-exp of each row of q."""
    return q.new_empty(shape_of_lse(q, packed), dtype=torch.float32)


def shape_of_lse(q: torch.Tensor, packed: bool = False) -> tuple[int, ...]:
    """(batch, num_heads, seqlen_q); of packed sequences (num_heads, total_q)."""
    batch, seqlen_q, num_heads, _ = q.shape
    return (num_heads, seqlen_q) if packed else (batch, num_heads, seqlen_q)


def no_lse(q: torch.Tensor) -> torch.Tensor:
    """In its place where nobody asks for it: operators have no optional outputs."""
    return q.new_empty(0, dtype=torch.float32)
