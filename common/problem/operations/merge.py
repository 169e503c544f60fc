"""Partial results of attention into one, as `merge_states` takes them.

    o_a    (batch, seqlen_q, num_heads, head_dim), and o_b: what attention gave over the keys of each side
    lse_a  their log-sum-exps, (batch, num_heads, seqlen_q), fp32, or, with a_rows_first, (batch, seqlen_q, num_heads);
           and lse_b, with b_rows_first. Of a side that sees no key it is -inf or +inf, and its o is not read
    o      as o_a, and lse as lse_a: what attention gives over all keys

With `wide` o_a and o are fp32. With `stacked` there is no side b: the rows of o_a are sides of one row, and lse_a has
rows first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.buffers import INPUT, OUTPUT, Tensor, contiguous, laid_out
from flashladder.common.problem.options import Option
from flashladder.common.problem.problem import BANDWIDTH, DTYPES, LSE, Operation, Problem


class Merge(Operation):
    """Drawn sides see no key in some rows, and are NaN there."""

    name = "merge"
    options: ClassVar[tuple[Option, ...]] = (
        Option("wide", bool, "side a and the result are fp32", default=False),
        Option("stacked", bool, "the rows of side a are sides of one row, and there is no side b", default=False),
        Option("a_rows_first", int, "1: the log-sum-exps of side a are (batch, seqlen_q, heads)", minimum=0, default=0),
        Option("b_rows_first", int, "the same of side b", minimum=0, default=0),
    )
    sizes = ("rows", "a_rows_first", "b_rows_first")
    signed_together: ClassVar[tuple[tuple[str, ...], ...]] = (("o_a", "o_b", "o"),)
    unit = BANDWIDTH
    usual: ClassVar = {"batch": 64, "num_heads": 32, "seqlen_q": 1}
    sampled: ClassVar = {"batch": 64, "num_heads": 32, "seqlen_q": 1}
    small: ClassVar = {"batch": 3, "num_heads": 4, "seqlen_q": 5}

    def check(self, problem: Problem) -> None:
        """The rows of stacked sides come first."""
        if problem.stacked and not problem.a_rows_first:
            raise UnsupportedProblemError("stacked=true takes a_rows_first=1: sides are where rows are")

    def argument(self, problem: Problem, name: str) -> Any:
        """The rows of the result."""
        if name == "rows":
            return 1 if problem.stacked else problem.seqlen_q
        return super().argument(problem, name)

    def flops(self, problem: Problem) -> float:
        """Nothing is multiplied by a matrix."""
        return 0.0

    def tensors(self, problem: Problem) -> dict[str, Tensor]:
        """Each in a buffer of its own."""
        p, narrow = problem, DTYPES[problem.dtype]
        first = torch.float32 if p.wide else narrow

        def of(rows: int, dtype: torch.dtype, role: str = INPUT) -> Tensor:
            return Tensor(laid_out(p.layout, (p.batch, rows, p.num_heads, p.head_dim)), dtype, role)

        def sums(rows: int, rows_first: int, role: str = INPUT) -> Tensor:
            shape = (p.batch, rows, p.num_heads) if rows_first else (p.batch, p.num_heads, rows)
            return Tensor(contiguous(*shape), torch.float32, role)

        rows = self.argument(p, "rows")
        found = {"o_a": of(p.seqlen_q, first), "lse_a": sums(p.seqlen_q, p.a_rows_first)}
        if not p.stacked:
            found |= {"o_b": of(rows, narrow), "lse_b": sums(rows, p.b_rows_first)}
        return {**found, "o": of(rows, first, OUTPUT), LSE: sums(rows, p.a_rows_first, OUTPUT)}

    def draw(self, problem: Problem, tensors: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
        """Log-sum-exps a few nats apart; a fifth of the rows of a side see no key."""
        super().draw(problem, tensors, generator)
        for side, empty in (("a", -math.inf), ("b", math.inf)):
            if f"lse_{side}" in tensors:
                lse = tensors[f"lse_{side}"].mul_(3)
                lse.masked_fill_(torch.rand(lse.shape, generator=generator, device=generator.device) < 0.2, empty)
                by_row = lse if getattr(problem, f"{side}_rows_first") else lse.transpose(1, 2)
                tensors[f"o_{side}"].masked_fill_(by_row.isinf()[..., None], math.nan)

    def compute(
        self, problem: Problem, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """By softmax over the sides."""
        p = problem
        sides = []
        for side in "a" if p.stacked else "ab":
            lse = tensors[f"lse_{side}"].to(dtype)
            by_row = lse if getattr(p, f"{side}_rows_first") else lse.transpose(1, 2)
            sides.append((tensors[f"o_{side}"].to(dtype), by_row.masked_fill(by_row == math.inf, -math.inf)))
        if p.stacked:
            o, lse = sides[0]
        else:
            o, lse = (torch.stack(both, 1) for both in zip(*sides, strict=True))  # (batch, sides, rows, ...)
        weights = lse.softmax(1).masked_fill(lse == -math.inf, 0)[..., None]
        merged, sums = (o.masked_fill(weights == 0, 0) * weights).sum(1), lse.logsumexp(1)
        if p.stacked:
            return {"o": merged[:, None], LSE: sums[:, None]}
        return {"o": merged, LSE: sums if p.a_rows_first else sums.transpose(1, 2)}


OPERATION = Merge()
