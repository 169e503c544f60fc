"""Tree -> text in C++ that says of a rectangle of scores whether a mask shows all of them, or none.

Whole numbers become ranges, truth values what they may be (common/cuda/softmax/ranges.cuh). What names neither q nor k
is the same in all of the rectangle, and exact. An element that is read at more than one place may be anything, and so
are numbers of fp32 that differ within it.
"""

from __future__ import annotations

from flashladder.common.expression import text
from flashladder.common.expression.tree import Binary, Call, Choice, Element, Name, Node, Type, Unary, names, walk
from flashladder.common.expression.typed import EQUALITY, LOGIC, ORDER

_TWO = {"+": "sum", "-": "difference", "*": "product", "/": "quotient", "%": "remainder"}
_COMPARED = {"<=": "at_most", "<": "below", "==": "equal"}
_TURNED = {">=": "<=", ">": "<"}  # with its sides exchanged


def c(node: Node) -> str:
    """A `Maybe` of a truth value, a `Range` of a number. `at` is a rectangle's first place, `q` and `k` its ranges."""
    if not names(node) & {"q", "k"}:
        return _unsure(node) if node.type == Type.FLOAT else _exact(node)
    return (_truth(node) if node.type == Type.BOOL else _number(node)) or _unsure(node)


def _exact(node: Node) -> str:
    return f"ranges::{'truth' if node.type == Type.BOOL else 'exactly'}({text.c(node)})"


def _unsure(node: Node) -> str:
    return "ranges::unknown()" if node.type == Type.BOOL else "ranges::any_number()"


def _truth(node: Node) -> str | None:
    match node:
        case Unary(operator="!", operand=operand):
            return f"ranges::inverse({c(operand)})"
        case Binary(operator=operator, left=left, right=right) if operator in LOGIC:
            # Only what is surely read may be read here: behind what decides alone no element is.
            function = "both" if operator == "&&" else "either"
            is_read = any(isinstance(part, Element) for part in walk(right))
            return f"ranges::{function}({c(left)}, [&] {{ return {c(right)}; }}, {str(not is_read).lower()})"
        case Binary(operator=operator, left=left, right=right) if operator in (*EQUALITY, *ORDER):
            if Type.FLOAT in (left.type, right.type):
                return None  # it may be beyond all whole numbers, or NaN
            if operator in _TURNED:
                operator, left, right = _TURNED[operator], right, left
            if operator == "!=":
                return f"ranges::inverse(ranges::equal({c(left)}, {c(right)}))"
            return f"ranges::{_COMPARED[operator]}({c(left)}, {c(right)})"
        case Choice():
            return _choice(node)
        case Element():
            return _element(node)
    return None


def _number(node: Node) -> str | None:
    if not node.type.is_whole:
        return None
    bits = "32" if node.type == Type.INT else "64"
    match node:
        case Name(name=name):
            return name
        case Unary(operator="-", operand=operand):
            return f"ranges::difference<{bits}>(ranges::exactly(0), {c(operand)})"
        case Binary(operator=operator, left=left, right=right) if operator in _TWO:
            return f"ranges::{_TWO[operator]}<{bits}>({c(left)}, {c(right)})"
        case Call(function=("min" | "max") as function, arguments=(left, right)):
            return f"ranges::{function}({c(left)}, {c(right)})"
        case Call(function="abs", arguments=(operand,)):
            return f"ranges::abs<{bits}>({c(operand)})"
        case Choice():
            return _choice(node)
        case Element():
            return _element(node)
    return None


def _choice(node: Choice) -> str:
    as_it_is = "" if node.type == Type.BOOL else "ranges::number"
    yes, no = (f"[&] {{ return {as_it_is}({c(part)}); }}" for part in (node.yes, node.no))
    return f"ranges::chosen({c(node.condition)}, {yes}, {no}, {_unsure(node)})"


def _element(node: Element) -> str:
    """Read where all of the rectangle reads the same one: at its first q and k."""
    one = " && ".join(f"{c(index)}.is_one()" for index in node.indices)
    return f"({one} ? {_exact(node)} : {_unsure(node)})"
