"""Forward attention: O = softmax(softmax_scale * Q K^T) V, and the log-sum-exp of each row of scores.

With ALiBi (Press et al., arXiv:2108.12409) scores lose a slope for each key on the way to their own. With sinks, as
gpt-oss has them, exp(sink) joins the sum of each row.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch

from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.expression import Mods
from flashladder.common.expression.evaluate import TORCH_DTYPES
from flashladder.common.problem import buffers, dropout, modified
from flashladder.common.problem.buffers import OUTPUT, Tensor, View, contiguous, laid_out
from flashladder.common.problem.config import listing
from flashladder.common.problem.families import FAMILIES
from flashladder.common.problem.problem import DTYPES, FEATURES, LSE, Operation, Problem

PACKED_INPUTS = "qkv"  # the layout of inputs that lie row by row in one buffer
V_IS_K = "kv"  # the layout of one tensor that is K and V, of which V has the first columns
LAYOUTS = (*buffers.LAYOUTS, PACKED_INPUTS, V_IS_K)
ALL_KEYS = 2**30  # a window without an end on that side
SLOPES, SINKS, TREE = "alibi_slopes", "sinks", "tree_mask"
_SCORES_LIMIT = 2**25  # elements of S held at a time by `attention`


class Forward(Operation):
    """q and k are (batch, seqlen, heads, head_dim), v and o (batch, seqlen, heads, head_dim_v); lse is (batch, heads,
    seqlen_q), fp32. Features have tensors of their own: see `of_features`."""

    name = "forward"
    features: ClassVar[tuple[str, ...]] = FEATURES
    families: ClassVar[Collection[str]] = FAMILIES
    layouts: ClassVar[tuple[str, ...]] = LAYOUTS
    signed_together: ClassVar[tuple[tuple[str, ...], ...]] = (("q", "k"), ("v", "o"))  # scores stay as they are

    def implied(self, problem: Problem) -> dict[str, Any]:
        """Expressions are spelled in one way, by which kernels are known."""
        return {"mods": Mods.parse(problem.mods).spelled} if problem.mods else {}

    def check(self, problem: Problem) -> None:
        """What is packed row by row has as many rows of each tensor, and all as wide; what is read has a shape."""
        read, shapes = Mods.parse(problem.mods).tensors, problem.extents
        if [tensor.rank for tensor in read] != [*map(len, shapes)] or any(
            size < 1 for shape in shapes for size in shape
        ):
            named = listing(tensor.name for tensor in read) or "nothing"
            raise UnsupportedProblemError(f"extents={shapes}: mods={problem.mods} reads {named}, each with a shape")
        rows = ("total_q", "total_k") if problem.packed else ("seqlen_q", "seqlen_k")
        for names in (rows, ("head_dim", "head_dim_v")):
            first, second = (getattr(problem, name) for name in names)
            if problem.layout == PACKED_INPUTS and first != second:
                raise UnsupportedProblemError(
                    f"layout=qkv packs q, k and v row by row: {names[0]}={first} must equal {names[1]}={second}"
                )
        if problem.layout == V_IS_K and problem.head_dim_v > problem.head_dim:
            raise UnsupportedProblemError(
                f"layout=kv has V among K's columns: head_dim_v={problem.head_dim_v} is at most {problem.head_dim}"
            )

    def argument(self, problem: Problem, name: str) -> Any:
        """A window without an end has one that no row reaches."""
        if name == "dropped":
            return dropout.dropped(problem.dropout_p)
        if problem.mods:
            for extent, tensor, dimension in Mods.parse(problem.mods).extents():
                if extent == name:
                    return problem.extents[tensor][dimension]
        value = super().argument(problem, name)
        if name not in ("window_left", "window_right"):
            return value
        return ALL_KEYS if value is None else min(value, ALL_KEYS)

    def flops(self, problem: Problem) -> float:
        """The two matrix products' operations over the keys that are seen; a causal square counts half."""
        p = problem
        rows, keys = p.seqlen_q, float(p.seqlen_k)
        if p.window:
            row = torch.arange(p.seqlen_q)
            rows, keys = 1, float((_seen_until(p, row) - _seen_from(p, row)).clamp(min=0).sum())
        elif p.causal:
            rows, keys = min(rows, p.seqlen_k), (max(0, p.seqlen_k - p.seqlen_q) + p.seqlen_k) / 2
        return 2.0 * p.batch * p.num_heads * rows * keys * (p.head_dim + p.head_dim_v)

    def blocks(self, problem: Problem, block_m: int, block_n: int) -> float:
        """One that a causal mask cuts is computed whole."""
        p = problem
        if p.packed or p.window:
            return super().blocks(p, block_m, block_n)
        ends = [min(first + block_m, p.seqlen_q) for first in range(0, p.seqlen_q, block_m)]
        hidden = [p.seqlen_q - end if p.causal else 0 for end in ends]
        return sum(math.ceil(max(0, p.seqlen_k - keys) / block_n) for keys in hidden) / len(ends)

    def tensors(self, problem: Problem) -> dict[str, Tensor]:
        """Each in a buffer of its own; in the layout qkv q, k and v share one, and in kv k and v are one."""
        p, dtype = problem, DTYPES[problem.dtype]
        batch, rows, keys = self._rows(p)
        of_q, of_k = (batch, rows, p.num_heads), (batch, keys, p.num_heads_k)
        shapes = {"q": (*of_q, p.head_dim), "k": (*of_k, p.head_dim), "v": (*of_k, p.head_dim_v)}
        views = {name: laid_out(p.layout, shape) for name, shape in shapes.items()}
        within: dict[str, str] = {}
        if p.layout == PACKED_INPUTS:
            strides = contiguous(batch, rows, p.num_heads + 2 * p.num_heads_k, p.head_dim).strides
            first_heads = {"q": 0, "k": p.num_heads, "v": p.num_heads + p.num_heads_k}
            views = {name: View(shapes[name], strides, head * p.head_dim) for name, head in first_heads.items()}
            within = dict.fromkeys(shapes, "q")
        if p.layout == V_IS_K:
            views["v"], within = View(shapes["v"], views["k"].strides), {"v": "k"}
        inputs = {name: Tensor(view, dtype, within=within.get(name, "")) for name, view in views.items()}
        o = Tensor(laid_out(p.layout, (*of_q, p.head_dim_v)), dtype, OUTPUT)
        return {**inputs, **of_features(p), "o": o, LSE: lse_of(p, batch, p.num_heads, rows)}

    def _rows(self, problem: Problem) -> tuple[int, int, int]:
        """The batch of its tensors, and the rows of Q and of K."""
        return problem.batch, problem.seqlen_q, problem.seqlen_k

    def default_scale(self, problem: Problem) -> float:
        """What the family of inputs wants, or 1/sqrt(head_dim)."""
        wanted = FAMILIES[problem.family].softmax_scale
        return wanted(DTYPES[problem.dtype]) if wanted else super().default_scale(problem)

    def draw(self, problem: Problem, tensors: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
        """As the family designs them, and what features bring; the random state first."""
        p = problem
        if p.dropout_p:
            tensors[dropout.RNG_STATE].copy_(dropout.drawn(generator.device, generator))
        self._design(p, tensors["q"], tensors["k"], tensors["v"], generator)
        if p.alibi:
            draw_slopes(tensors[SLOPES], generator)
        if p.sinks:
            draw_sinks(tensors[SINKS], generator)
        for tensor in Mods.parse(p.mods).tensors:
            draw_read(tensors[tensor.field], generator)

    def _design(
        self, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator
    ) -> None:
        """Fills tensors, (batch, seqlen, heads, columns), as the family says."""
        FAMILIES[problem.family].draw(q, k, v, problem.softmax_scale, generator)

    def compute(
        self, problem: Problem, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """As `attention` does."""
        o, lse = attention(problem, tensors, dtype)
        return {"o": o, "lse": lse}


OPERATION = Forward()


def of_features(problem: Problem) -> dict[str, Tensor]:
    """ALiBi's slopes (batch, num_heads) and sinks (num_heads,), fp32; dropout's rng_state (3,), int32; what expressions
    read, element after element."""
    found = {}
    if problem.alibi:
        found[SLOPES] = Tensor(contiguous(problem.batch, problem.num_heads), torch.float32)
    if problem.sinks:
        found[SINKS] = Tensor(contiguous(problem.num_heads), torch.float32)
    if problem.dropout_p:
        found[dropout.RNG_STATE] = Tensor(contiguous(dropout.STATE_WORDS), torch.int32)
    for tensor, shape in zip(Mods.parse(problem.mods).tensors, problem.extents, strict=True):
        found[tensor.field] = Tensor(contiguous(math.prod(shape)), TORCH_DTYPES[tensor.dtype])
    return found


def lse_of(problem: Problem, *shape: int) -> Tensor:
    """The log-sum-exp, fp32, which a problem may not ask for."""
    return Tensor(contiguous(*shape), torch.float32, OUTPUT, optional=not problem.lse)


def attention(
    problem: Problem, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, number: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Textbook attention with every intermediate in `dtype`: o and lse; rows that see no key get 0 and -inf, or the
    sink.

    `number` is that of its first sequence, where dropout and expressions count others before it.
    With ALiBi scores are of fp32 at least, as they are in flash-attn's own tests.
    """
    p = problem
    o = torch.empty((p.batch, p.seqlen_q, p.num_heads, p.head_dim_v), dtype=dtype, device=tensors["q"].device)
    lse = torch.empty((p.batch, p.num_heads, p.seqlen_q), dtype=dtype, device=tensors["q"].device)
    with full_precision_matmul():
        for batch in range(p.batch):
            q, k, v = heads_of(p, tensors, "qkv", batch, dtype)
            for block in row_blocks(p):
                scores = masked_scores(p, tensors, batch, q[:, block], k, block)
                scores = modified_scores(p, tensors, number + batch, block, scores)
                scores = _beside_sinks(p, tensors, scores)
                lse[batch, :, block] = scores.logsumexp(-1)
                seen = probabilities(scores)[..., : p.seqlen_k]  # without the sink
                weights = kept(p, tensors, number + batch, block, seen.to(dtype))
                o[batch, block] = (weights @ v).transpose(0, 1)
    return o, lse


def draw_slopes(slopes: torch.Tensor, generator: torch.Generator) -> None:
    """From 1 down to 2^-8, as the paper's are."""
    slopes.copy_(torch.exp2(-8 * torch.rand(slopes.shape, generator=generator, device=generator.device)))


def draw_sinks(sinks: torch.Tensor, generator: torch.Generator) -> None:
    """Of a few nats."""
    sinks.copy_(3 * torch.randn(sinks.shape, generator=generator, device=generator.device))


def draw_read(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """What an expression reads: few whole numbers, of which many are alike, or normal ones."""
    drawn = torch.randn(tensor.shape, generator=generator, device=generator.device)
    tensor.copy_(drawn if tensor.is_floating_point() else drawn.abs().trunc())


def heads_of(
    problem: Problem, tensors: Mapping[str, torch.Tensor], names: Iterable[str], batch: int, dtype: torch.dtype
) -> Iterator[torch.Tensor]:
    """The named tensors of one batch, (num_heads, rows, columns): heads of K and V as often as heads of Q use them.

    One head for all is not copied. They are to be read alone.
    """
    for name in names:
        heads = tensors[name][batch].transpose(0, 1).to(dtype)
        yield heads[:, None].expand(-1, problem.num_heads // heads.shape[0], -1, -1).flatten(0, 1)


def row_blocks(problem: Problem) -> Iterator[slice]:
    """The rows of Q in blocks, so that S of a block is small."""
    yield from row_slices(problem.seqlen_q, problem.num_heads * problem.seqlen_k)


def row_slices(seqlen_q: int, scores: int) -> Iterator[slice]:
    """The same of rows with so many scores each."""
    rows = max(1, _SCORES_LIMIT // scores)
    for begin in range(0, seqlen_q, rows):
        yield slice(begin, min(begin + rows, seqlen_q))


def masked_scores(
    problem: Problem, tensors: Mapping[str, torch.Tensor], batch: int, q: torch.Tensor, k: torch.Tensor, rows: slice
) -> torch.Tensor:
    """The scores of a block of rows, -inf where a row does not see a key: (num_heads, rows, seqlen_k)."""
    p = problem
    scores = (q * p.softmax_scale) @ k.transpose(1, 2)
    if p.softcap:
        scores = p.softcap * torch.tanh(scores / p.softcap)
    if p.alibi:
        slopes = tensors[SLOPES][batch, :, None, None].to(torch.promote_types(q.dtype, torch.float32))
        scores = scores - slopes * _distance(p, rows, scores.device)
    if p.causal or p.window:
        scores.masked_fill_(_hidden(p, rows, scores.device), -math.inf)
    if TREE in tensors:
        scores[..., -p.seqlen_q :].masked_fill_(_on_other_branches(p, tensors[TREE][batch, rows]), -math.inf)
    return scores


def modified_scores(
    problem: Problem, tensors: Mapping[str, torch.Tensor], sequence: int, rows: slice, scores: torch.Tensor,
    needed: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Scores of a block of rows as expressions change and hide them; -inf where they are not `needed`."""
    p = problem
    if not p.mods:
        return scores
    mods = Mods.parse(p.mods)
    read, lengths = modified.shaped(mods, p.extents, tensors), (p.seqlen_q, p.seqlen_k)
    if p.causal or p.window:
        seen = ~_hidden(p, rows, scores.device)
        needed = seen if needed is None else seen & needed
    return modified.modified(mods, read, scores, sequence, rows.start, lengths, needed)


def _beside_sinks(problem: Problem, tensors: Mapping[str, torch.Tensor], scores: torch.Tensor) -> torch.Tensor:
    """Scores, and behind them each row's sink, where there are any."""
    if not problem.sinks:
        return scores
    sinks = tensors[SINKS].to(scores)[:, None, None].expand(*scores.shape[:2], 1)
    return torch.cat((scores, sinks), -1)


def probabilities(scores: torch.Tensor) -> torch.Tensor:
    """P of scores: 0 in rows that see no key."""
    return scores.softmax(-1).masked_fill_(scores.amax(-1, keepdim=True) == -math.inf, 0)


def kept(
    problem: Problem, tensors: Mapping[str, torch.Tensor], batch: int, rows: slice, values: torch.Tensor
) -> torch.Tensor:
    """`values` of a block of rows, (num_heads, rows, seqlen_k), as dropout leaves them: 0, or larger than they were."""
    p = problem
    if not p.dropout_p:
        return values
    heads = range(batch * p.num_heads, (batch + 1) * p.num_heads)
    mask = dropout.kept(tensors[dropout.RNG_STATE], p.dropout_p, heads, range(rows.start, rows.stop), p.seqlen_k)
    return (values * dropout.rescale(p.dropout_p)).masked_fill_(~mask, 0)


def _on_other_branches(problem: Problem, masks: torch.Tensor) -> torch.Tensor:
    """Which of the last keys, as many as rows, rows do not see by their masks: (rows, keys)."""
    nodes = torch.arange(problem.seqlen_q, device=masks.device)[-problem.seqlen_k :]
    return (masks[:, None] >> nodes & 1) == 0


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
def full_precision_matmul() -> Iterator[None]:
    """No TF32, whatever the process has set."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
