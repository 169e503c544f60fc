"""Which indices surely leave their tensor, whatever is in it: known from sizes alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from flashladder.common.expression.evaluate import Evaluator, Values
from flashladder.common.expression.tree import Binary, Choice, Element, Node, names, walk


def check(what: str, source: str, tree: Node, places: Values, extents: Mapping[str, tuple[int, ...]]) -> None:
    """ExpressionError for an index that leaves its tensor at one of the `places`, where nothing depends on a condition.

    `places` are positions and sizes by their names, of shapes that broadcast. An index that depends on what a tensor
    holds is not known.
    """
    blank = {name: torch.empty(()).expand(shape) for name, shape in extents.items()}
    for element in _always_read(tree):
        for dimension, index in enumerate(element.indices):
            if any(isinstance(part, Element) for part in walk(index)):
                continue
            named = names(index)
            values = {name: x if name in named else x.flatten()[0] for name, x in places.items()}
            Evaluator(values, blank, what=what, text=source).index(element, dimension)


def edges(first_row: int, seqlen_k: int, left: int, right: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of q and k: the first and the last key that each row sees, and the first and the last row that sees each
    key, where a row sees the keys from q - left to q + right.

    Each q, each k and each q - k that there is stands in one of them. What only grows or only falls with k, or with q,
    is largest and smallest at one.
    """
    rows, keys = torch.arange(first_row, seqlen_k), torch.arange(seqlen_k)
    q = torch.cat((rows, rows, (keys - right).clamp(min=first_row), (keys + left).clamp(max=seqlen_k - 1)))
    k = torch.cat(((rows - left).clamp(min=0), (rows + right).clamp(max=seqlen_k - 1), keys, keys))
    seen = (k >= 0) & (k < seqlen_k) & (q >= first_row) & (q < seqlen_k) & (k >= q - left) & (k <= q + right)
    return q[seen], k[seen]


def _always_read(node: Node) -> Iterator[Element]:
    """The elements that no condition stands before."""
    if isinstance(node, Element):
        yield node
    parts = node.parts
    if isinstance(node, Choice) or (isinstance(node, Binary) and node.operator in ("&&", "||")):
        parts = parts[:1]
    for part in parts:
        yield from _always_read(part)
