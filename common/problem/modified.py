"""What expressions make of scores, by torch: for exact answers, and to find what they read beyond their tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from flashladder.common.expression import Mods
from flashladder.common.expression.evaluate import Evaluator, Values


def modified(
    mods: Mods, read: Values, scores: torch.Tensor, sequence: int, first_row: int, lengths: tuple[int, int],
    seen: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Scores of the rows from `first_row` on, (num_heads, rows, seqlen_k), -inf for keys that the mask hides; fp32 at
    least.

    `read` has the tensors by the names that expressions have for them, `sequence` is b, `lengths` are seqlen_q and
    seqlen_k. Only where keys are `seen`, (rows, seqlen_k), are indices looked at. ExpressionError for one that leaves
    its tensor.
    """
    values = _places(scores, sequence, first_row, lengths)
    found = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mods.score is not None:
        evaluator = Evaluator({**values, "s": found}, read, found.dtype, "score", mods.sources["score"])
        found = evaluator.value(mods.score, seen).to(found.dtype).expand(found.shape)
    if mods.mask is not None:
        kept = Evaluator(values, read, torch.float32, "mask", mods.sources["mask"]).value(mods.mask, seen)
        found = found.masked_fill(~kept, -math.inf)
    return found if seen is None else found.masked_fill(~seen, -math.inf)


def _places(scores: torch.Tensor, sequence: int, first_row: int, lengths: tuple[int, int]) -> dict[str, torch.Tensor]:
    """The names of an expression but for s, for scores (num_heads, rows, seqlen_k)."""
    seqlen_q, seqlen_k = lengths
    heads, rows, keys = (torch.arange(size, device=scores.device) for size in scores.shape)
    first = first_row + seqlen_k - seqlen_q
    places = {"b": torch.tensor(sequence), "h": heads[:, None, None], "q": (rows + first)[:, None], "k": keys}
    sizes = {"seqlen_q": torch.tensor(seqlen_q), "seqlen_k": torch.tensor(seqlen_k)}
    return {name: value.to(scores.device) for name, value in {**places, **sizes}.items()}


def shaped(mods: Mods, extents: Sequence[tuple[int, ...]], tensors: Mapping[str, torch.Tensor]) -> Values:
    """A problem's tensors by the names and in the shapes that expressions have for them."""
    found = zip(mods.tensors, extents, strict=True)
    return {tensor.name: tensors[tensor.field].reshape(shape) for tensor, shape in found}
