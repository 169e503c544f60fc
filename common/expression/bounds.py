"""Which indices surely leave their tensor, whatever is in it: known from sizes alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from flashladder.common.errors import ExpressionError
from flashladder.common.expression.tree import POSITIONS, Binary, Call, Choice, Element, Name, Node, Number, Unary, walk


class Range(NamedTuple):
    """Of whole numbers; both ends are reached."""

    low: int
    high: int


Ranges = Mapping[str, Range]


def check(
    what: str, source: str, tree: Node, ranges: Ranges, extents: Mapping[str, tuple[int, ...]], are_apart: bool
) -> None:
    """ExpressionError for an index that leaves its tensor at some position, and is read at every one.

    `ranges` are those of positions and sizes, each on its own. `are_apart`: each q meets each k.
    """
    for element in _always_read(tree):
        for dimension, index in enumerate(element.indices):
            extent = extents[element.tensor.name][dimension]
            found = _range(index, ranges)
            if found is None or not _is_reached(index, are_apart) or (found.low >= 0 and found.high < extent):
                continue
            number = ("first", "second", "third", "fourth")[dimension] if element.tensor.rank > 1 else "only"
            raise ExpressionError.at(
                what,
                source,
                index.span,
                f"this index goes from {found.low} to {found.high}, and {element.tensor.name} has {extent} elements "
                f"along its {number} dimension",
            )


def _always_read(node: Node) -> Iterator[Element]:
    """The elements that no condition stands before."""
    if isinstance(node, Element):
        yield node
    parts = node.parts
    if isinstance(node, Choice) or (isinstance(node, Binary) and node.operator in ("&&", "||")):
        parts = parts[:1]
    for part in parts:
        yield from _always_read(part)


def _is_reached(index: Node, are_apart: bool) -> bool:
    """Whether the ends of its range are reached: no position stands in it twice, nor q with a k it may not meet."""
    found = [part.name for part in walk(index) if isinstance(part, Name) and part.name in POSITIONS]
    return len(found) == len(set(found)) and (are_apart or not {"q", "k"} <= set(found))


def _range(node: Node, ranges: Ranges) -> Range | None:
    """That of a whole number; None where it is not known."""
    match node:
        case Number(value=int(value)):
            return Range(value, value)
        case Name(name=name):
            return ranges.get(name)
        case Unary(operator="-", operand=operand):
            of = _range(operand, ranges)
            return of and Range(-of.high, -of.low)
        case Binary(operator=operator, left=left, right=right):
            first, second = _range(left, ranges), _range(right, ranges)
            return _of_two(operator, first, second) if first and second else None
        case Call(function="min" | "max" as function, arguments=(left, right)):
            first, second = _range(left, ranges), _range(right, ranges)
            if not (first and second):
                return None
            choose = min if function == "min" else max
            return Range(choose(first.low, second.low), choose(first.high, second.high))
    return None


def _of_two(operator: str, left: Range, right: Range) -> Range | None:
    match operator:
        case "+":
            return Range(left.low + right.low, left.high + right.high)
        case "-":
            return Range(left.low - right.high, left.high - right.low)
        case "*":
            products = [a * b for a in left for b in right]
            return Range(min(products), max(products))
        case "/" if right.low == right.high > 0 and left.low >= 0:
            return Range(left.low // right.low, left.high // right.low)
        case "%" if right.low == right.high > 0 and left.low == 0:
            return Range(0, min(left.high, right.low - 1))
    return None
