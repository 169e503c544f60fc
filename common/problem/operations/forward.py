"""Forward attention: O = softmax(softmax_scale * Q K^T) V, and the log-sum-exp of each row of scores."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch

from flashladder.common.problem.buffers import View, contiguous
from flashladder.common.problem.families import FAMILIES
from flashladder.common.problem.operations.operation import DTYPES, Operation

if TYPE_CHECKING:
    from flashladder.common.problem.problem import Problem

ALL_KEYS = 2**30  # a window without an end on that side
_SCORES_LIMIT = 2**25  # elements of S held at a time by `attention`


class Forward(Operation):
    """q, k, v and o are (batch, seqlen, heads, head_dim); lse is (batch, heads, seqlen_q), fp32."""

    name = "forward"
    inputs: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    outputs = ("o", "lse")
    families: ClassVar[Collection[str]] = FAMILIES
    signed_together = (("q", "k"), ("v", "o"))  # scores stay as they are

    def flops(self, problem: Problem) -> float:
        """The two matrix products' operations over the keys that are seen; a causal square counts half."""
        p = problem
        rows, keys = p.seqlen_q, float(p.seqlen_k)
        if p.window:
            row = torch.arange(p.seqlen_q)
            rows, keys = 1, float((_seen_until(p, row) - _seen_from(p, row)).clamp(min=0).sum())
        elif p.causal:
            rows, keys = min(rows, p.seqlen_k), (max(0, p.seqlen_k - p.seqlen_q) + p.seqlen_k) / 2
        return 4.0 * p.batch * p.num_heads * rows * keys * p.head_dim

    def views(self, problem: Problem) -> list[dict[str, View]]:
        """Each tensor in a buffer of its own; in the layout qkv the inputs share one."""
        p = problem
        q, k = (p.batch, p.seqlen_q, p.num_heads, p.head_dim), (p.batch, p.seqlen_k, p.num_heads_k, p.head_dim)
        lse = {"lse": contiguous(p.batch, p.num_heads, p.seqlen_q)}
        if p.layout != "qkv":
            return [{name: laid_out(p.layout, shape)} for name, shape in zip("qkvo", (q, k, k, q), strict=True)] + [lse]
        strides = contiguous(p.batch, p.seqlen_q, p.num_heads + 2 * p.num_heads_k, p.head_dim).strides
        first_heads = {"q": 0, "k": p.num_heads, "v": p.num_heads + p.num_heads_k}
        packed = {name: View(q if name == "q" else k, strides, head * p.head_dim) for name, head in first_heads.items()}
        return [packed, {"o": contiguous(*q)}, lse]

    def argument(self, problem: Problem, name: str) -> float:
        """A window without an end on a side has ALL_KEYS there."""
        value = super().argument(problem, name)
        if name not in ("window_left", "window_right"):
            return value
        return ALL_KEYS if value is None else min(value, ALL_KEYS)

    def default_scale(self, problem: Problem) -> float:
        """What the family of inputs wants, or 1/sqrt(head_dim)."""
        wanted = FAMILIES[problem.family].softmax_scale
        return wanted(DTYPES[problem.dtype]) if wanted else super().default_scale(problem)

    def draw(self, problem: Problem, tensors: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
        """As the family designs them."""
        q, k, v = (tensors[name] for name in "qkv")
        FAMILIES[problem.family].draw(q, k, v, problem.softmax_scale, generator)

    def compute(
        self, problem: Problem, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """As `attention` does."""
        o, lse = attention(problem, tensors, dtype)
        return {"o": o, "lse": lse}


FORWARD = Forward()


def laid_out(layout: str, shape: tuple[int, int, int, int]) -> View:
    """(batch, seqlen, heads, head_dim) as a layout has it: bshd, bhsd or padded."""
    batch, seqlen, heads, head_dim = shape
    if layout == "bhsd":
        by_batch, by_head, by_row, _ = contiguous(batch, heads, seqlen, head_dim).strides
        return View(shape, (by_batch, by_row, by_head, 1))
    if layout == "padded":
        return View(shape, contiguous(batch, seqlen + 3, heads + 1, head_dim + 8).strides)
    return contiguous(*shape)


def attention(
    problem: Problem, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Textbook attention with every intermediate in `dtype`: o like q, and lse; rows that see no key get 0 and -inf.

    With ALiBi scores are of fp32 at least, as they are in flash-attn's own tests.
    """
    p = problem
    o = torch.empty(tensors["q"].shape, dtype=dtype, device=tensors["q"].device)
    lse = torch.empty((p.batch, p.num_heads, p.seqlen_q), dtype=dtype, device=tensors["q"].device)
    rows = max(1, _SCORES_LIMIT // (p.num_heads * p.seqlen_k))
    with _full_precision_matmul():
        for batch in range(p.batch):
            q = tensors["q"][batch].transpose(0, 1).to(dtype) * p.softmax_scale
            k, v = (
                tensor[batch].transpose(0, 1).to(dtype).repeat_interleave(p.num_heads // p.num_heads_k, 0)
                for tensor in (tensors["k"], tensors["v"])
            )
            for begin in range(0, p.seqlen_q, rows):
                block = slice(begin, min(begin + rows, p.seqlen_q))
                scores = q[:, block] @ k.transpose(1, 2)
                if p.softcap:
                    scores = p.softcap * torch.tanh(scores / p.softcap)
                if p.alibi:
                    slopes = tensors["alibi_slopes"][batch, :, None, None].to(torch.promote_types(dtype, torch.float32))
                    scores = scores - slopes * _distance(p, block, scores.device)
                if p.causal or p.window:
                    scores.masked_fill_(_hidden(p, block, scores.device), -math.inf)
                lse[batch, :, block] = scores.logsumexp(-1)
                probabilities = scores.softmax(-1).masked_fill_(lse[batch, :, block, None] == -math.inf, 0)
                o[batch, block] = (probabilities.to(dtype) @ v).transpose(0, 1)
    return o, lse


def _distance(problem: Problem, rows: slice, device: torch.device) -> torch.Tensor:
    """Of each key from a row's own, to the bottom right: (rows, seqlen_k)."""
    own = torch.arange(rows.start, rows.stop, device=device)[:, None] + problem.seqlen_k - problem.seqlen_q
    return (own - torch.arange(problem.seqlen_k, device=device)).abs()


def _hidden(problem: Problem, rows: slice, device: torch.device) -> torch.Tensor:
    """Which keys each of the rows does not see under a causal mask or beyond a window: (rows, seqlen_k)."""
    row = torch.arange(rows.start, rows.stop, device=device)[:, None]
    key = torch.arange(problem.seqlen_k, device=device)
    return (key < _seen_from(problem, row)) | (key >= _seen_until(problem, row))


def _seen_from(problem: Problem, row: torch.Tensor) -> torch.Tensor:
    """The first key that a row sees, if it sees any."""
    if problem.window_left is None:
        return torch.zeros_like(row)
    return (row + problem.seqlen_k - problem.seqlen_q - problem.window_left).clamp(min=0)


def _seen_until(problem: Problem, row: torch.Tensor) -> torch.Tensor:
    """The key behind the last one that it sees."""
    behind = 0 if problem.causal else problem.window_right
    if behind is None:
        return torch.full_like(row, problem.seqlen_k)
    return (row + problem.seqlen_k - problem.seqlen_q + behind + 1).clamp(max=problem.seqlen_k)


@contextlib.contextmanager
def _full_precision_matmul() -> Iterator[None]:
    """No TF32, whatever the process has set."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
