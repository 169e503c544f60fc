"""Masks that are a window alone: how many keys before its own and behind it a row sees."""

from __future__ import annotations

from typing import NamedTuple

from flashladder.common.expression.tree import Binary, Name, Node, Number, Type, Unary

MOST_ADDED = 1 << 20  # of a constant, so that sums of positions and a few of these have 32 bits
_TURNED = {"<=": ">=", ">=": "<=", "<": ">", ">": "<", "==": "=="}  # with its sides exchanged


class Band(NamedTuple):
    """A row q sees the keys from q - left to q + right; None: all of that side."""

    left: int | None = None
    right: int | None = None

    def within(self, other: Band) -> Band:
        """What both show."""
        return Band(_least(self.left, other.left), _least(self.right, other.right))


def band(mask: Node) -> Band | None:
    """What a mask shows where it is this alone, and each row's own key is in it; None of any other mask."""
    match mask:
        case Number(value=True, type=Type.BOOL):
            return Band()
        case Binary(operator="&&", left=left, right=right):
            first, second = band(left), band(right)
            return first.within(second) if first and second else None
        case Binary(operator=operator, left=left, right=right) if operator in _TURNED:
            found = _compared(operator, _linear(left), _linear(right))
            return found if found and all(side is None or side >= 0 for side in found) else None
    return None


def _least(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def _compared(operator: str, left: _Linear | None, right: _Linear | None) -> Band | None:
    if left is None or right is None:
        return None
    of_q, of_k, number = (a - b for a, b in zip(left, right, strict=True))
    if (of_q, of_k) not in ((1, -1), (-1, 1)):
        return None
    if of_q < 0:
        operator = _TURNED[operator]
    most = -number * of_q  # q - k is compared with it
    if operator == "==":
        return Band(most, -most)
    if operator in ("<=", "<"):
        return Band(left=most - (operator == "<"))
    return Band(right=-most - (operator == ">"))


_Linear = tuple[int, int, int]


def _linear(node: Node) -> _Linear | None:
    """How often q and k are in a sum of whole numbers, and what else; None of anything else."""
    match node:
        case Number(type=Type.INT, value=value) if abs(value) <= MOST_ADDED:
            return 0, 0, int(value)
        case Name(name="q"):
            return 1, 0, 0
        case Name(name="k"):
            return 0, 1, 0
        case Unary(operator="-", operand=operand) if found := _linear(operand):
            a, b, number = found
            return -a, -b, -number
        case Binary(operator="+" | "-" as operator, left=left, right=right):
            first, second, sign = _linear(left), _linear(right), 1 if operator == "+" else -1
            if first is not None and second is not None:
                a, b, number = (x + sign * y for x, y in zip(first, second, strict=True))
                return a, b, number
    return None
