"""Tree -> text in C++ that says of a rectangle of scores whether a mask shows all of them, or none.

Whole numbers become ranges, truth values what they may be (common/cuda/softmax/ranges.cuh). What names neither q nor k
is the same in all of the rectangle, and exact. Elements that are read at few places are all read, for the least and the
largest. At more places they may be anything. A number of fp32 that surely only grows, or only falls, with q alone or
with k alone lies between what it is at both ends; another one that differs within the rectangle may be anything.
"""

from __future__ import annotations

import math

from flashladder.common.expression import text
from flashladder.common.expression.band import MOST_ADDED
from flashladder.common.expression.tree import (
    SIZES,
    Binary,
    Call,
    Choice,
    Element,
    Name,
    Node,
    Number,
    Type,
    Unary,
    names,
    walk,
)
from flashladder.common.expression.typed import EQUALITY, LOGIC, ORDER

_TWO = {"+": "sum", "-": "difference", "*": "product", "/": "quotient", "%": "remainder"}
_COMPARED = {"<=": "at_most", "<": "below", "==": "equal"}
_TURNED = {">=": "<=", ">": "<"}  # with its sides exchanged


def c(node: Node) -> str:
    """A `Maybe` of a truth value, a `Range` of a number. `at` is a rectangle's first place, `q` and `k` its ranges."""
    if not _moves(node):
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
            if operator in _TURNED:
                operator, left, right = _TURNED[operator], right, left
            known = _float_range if Type.FLOAT in (left.type, right.type) else c
            if (first := known(left)) is None or (second := known(right)) is None:
                return None
            if operator == "!=":
                return f"ranges::inverse(ranges::equal({first}, {second}))"
            return f"ranges::{_COMPARED[operator]}({first}, {second})"
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
        case Call(function="int", arguments=(operand,)) if operand.type == Type.FLOAT and (
            found := _float_range(operand)
        ):
            return f"expression::to_int({found})"
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
    """Of all that the rectangle reads, or more, but nothing beyond: the places between two of its own."""
    places = [f"i{number}" for number in range(len(node.indices))]
    named = ", ".join(f"long long {place}" for place in places)
    read = f"[&]({named}) {{ return {text.element(node, places)}; }}"
    return f"ranges::elements({_unsure(node)}, {read}, {', '.join(map(_places, node.indices))})"


def _places(index: Node) -> str:
    return c(index) if _reaches_its_ends(index) else f"ranges::if_one({c(index)})"


def _reaches_its_ends(node: Node) -> bool:
    """Whether the least and the largest number of a range surely come of a q and a k of the rectangle."""
    if not _moves(node):
        return True
    match node:
        case Name():
            return True
        case Unary(operator="-", operand=operand):
            return _reaches_its_ends(operand)
        case (
            Binary(operator="+" | "-" | "*", left=left, right=right)
            | Call(function="min" | "max", arguments=(left, right))
        ):
            is_free = not _moves(left) & _moves(right)
            return is_free and _reaches_its_ends(left) and _reaches_its_ends(right)
        case Binary(operator="/", left=left):  # by one number, or it has no range
            return _reaches_its_ends(left)
    return False


def _float_range(node: Node) -> str | None:
    """Of a number as one of fp32: what it is at both ends of the range that moves it. None where that tells nothing."""
    moved = _moves(node)
    if not moved:
        return f"ranges::alike({text.c(node)})"
    if len(moved) > 1 or not _goes_one_way(node):
        return None
    name = min(moved)
    return f"ranges::ends_of_{name}(at, {name}, [&](const Place &at) {{ return {text.c(node)}; }})"


def _goes_one_way(node: Node) -> bool:
    """Whether it only grows or only falls with its position, rounded too. Where it is NaN somewhere, an end is."""
    match node:
        case Name():
            return True
        case (
            Unary(operator="-", operand=operand)
            | Call(function="floor" | "ceil" | "sqrt" | "float", arguments=(operand,))
        ):
            return _goes_one_way(operand)
        case Binary(operator="+" | "-", left=left, right=right):
            # One rounding of a product and a sum is not two: compilers choose, and may choose twice.
            is_rounded_once = any(part.type == Type.FLOAT and _is_product(part) for part in (left, right))
            sides = (left, right) if _moves(left) else (right, left)
            return not is_rounded_once and _goes_one_way(sides[0]) and _is_finite(sides[1])
        case Binary(operator="*", left=left, right=right) if node.type == Type.FLOAT:
            sides = (left, right) if _moves(left) else (right, left)
            return _goes_one_way(sides[0]) and _is_factor(sides[1])
        case Binary(operator="/", left=left, right=right) if node.type == Type.FLOAT:
            return bool(_moves(left)) and _goes_one_way(left) and _is_factor(right)
    return False


def _is_product(node: Node) -> bool:
    """Or it may become one: compilers leave out what does not change a number."""
    match node:
        case Unary(operand=part) | Call(function="float", arguments=(part,)) | Binary(operator="/", left=part):
            return _is_product(part)
        case Binary(operator=operator):
            return operator == "*"
    return False


def _is_finite(node: Node) -> bool:
    match node:
        case Number(value=value):
            return math.isfinite(value) and (node.type == Type.FLOAT or abs(value) <= MOST_ADDED)
        case Name(name=name):
            return name in SIZES
    return False


def _is_factor(node: Node) -> bool:
    """Where it is evaluated no length is 0."""
    return _is_finite(node) and not (isinstance(node, Number) and node.value == 0)


def _moves(node: Node) -> set[str]:
    """What of q and k it names."""
    return names(node) & {"q", "k"}
