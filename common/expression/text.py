"""Tree -> text: the one that a person would write, by which kernels are known, and the one that compilers read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from flashladder.common.expression.tree import (
    SCORE,
    Binary,
    Call,
    Choice,
    Element,
    Name,
    Node,
    Number,
    Type,
    Unary,
)
from flashladder.common.expression.typed import EQUALITY, LEVELS, ORDER, SHIFTS, TIGHTNESS, fp32

MOST_DIGITS = 9  # with so many any number of fp32 is read back
_CHOICE, _UNARY, _VALUE = 0, len(LEVELS) + 1, len(LEVELS) + 2
C_TYPES = {Type.BOOL: "bool", Type.INT: "int", Type.LONG: "long long", Type.FLOAT: "float"}
GIVEN = "const Params &params, const Place &at"  # to a function that a text is the body of
_C_NAMES = {"int": "to_int", "float": "to_float"}  # C++ has other uses for these words
# Of whole numbers, where C leaves some results undefined.
_GUARDED = {"+": "sum", "-": "difference", "*": "product", "/": "quotient", "%": "remainder"}
_GUARDED |= {"<<": "shifted_left", ">>": "shifted_right"}


def normal(node: Node) -> str:
    """The shortest text of a tree: one for all that differ in spaces, needless brackets or the spelling of numbers."""
    return _normal(node)[0]


def _normal(node: Node) -> tuple[str, int]:
    """With how tightly it binds."""
    match node:
        case Number(value=value):
            return _number(value), _VALUE
        case Name(name=name):
            return name, _VALUE
        case Element(tensor=tensor, indices=indices):
            return tensor.name + "".join(f"[{normal(index)}]" for index in indices), _VALUE
        case Call(function=function, arguments=arguments):
            return f"{function}({','.join(map(normal, arguments))})", _VALUE
        case Unary(operator=operator, operand=operand):
            return operator + _within(operand, _UNARY), _UNARY
        case Binary(operator=operator, left=left, right=right):
            level = TIGHTNESS[operator]
            return _within(left, level) + operator + _within(right, level + 1), level
        case Choice(condition=condition, yes=yes, no=no):
            return f"{_within(condition, _CHOICE + 1)}?{normal(yes)}:{normal(no)}", _CHOICE
    raise TypeError(node)


def _within(node: Node, level: int) -> str:
    text, tightness = _normal(node)
    return text if tightness >= level else f"({text})"


def _number(value: bool | float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    digits = (float(f"{value:.{count}g}") for count in range(1, MOST_DIGITS + 1))
    return repr(next(each for each in digits if fp32(each) == value))  # inf too


def c(node: Node, held: Mapping[Node, str] = MappingProxyType({})) -> str:
    """What the device's compiler reads: positions are members of `at`, tensors of `params`.

    common/cuda/softmax/expression.cuh has the functions. Every operand stands in brackets. `held` has names of parts
    that are evaluated already.
    """

    def of(part: Node) -> str:
        return c(part, held)

    def converted(kind: Type, part: Node) -> str:
        """A part's value as a type that is higher, or its own."""
        return of(part) if part.type == kind else f"static_cast<{C_TYPES[kind]}>({of(part)})"

    if node in held:
        return held[node]
    match node:
        case Number():
            return _c_number(node)
        case Name(name=name):
            return name if name == SCORE else f"at.{name}"
        case Element():
            return element(node, [of(index) for index in node.indices])
        case Call(function=function, arguments=arguments):
            taken = (of(each) if function == "int" else converted(node.type, each) for each in arguments)
            return f"expression::{_C_NAMES.get(function, function)}({', '.join(taken)})"
        case Unary(operator=operator, operand=operand):
            it = converted(node.type, operand)
            return f"expression::negative({it})" if operator == "-" and node.type.is_whole else f"({operator}{it})"
        case Binary(operator=operator, left=left, right=right):
            kind = max(left.type, right.type) if operator in (*EQUALITY, *ORDER) else node.type
            first, second = converted(kind, left), converted(right.type if operator in SHIFTS else kind, right)
            if operator in _GUARDED and node.type.is_whole:
                return f"expression::{_GUARDED[operator]}({first}, {second})"
            return f"({first} {operator} {second})"
        case Choice(condition=condition, yes=yes, no=no):
            return f"({of(condition)} ? {converted(node.type, yes)} : {converted(node.type, no)})"
    raise TypeError(node)


def _c_number(node: Number) -> str:
    value = node.value
    if isinstance(value, bool):
        return _number(value)
    if isinstance(value, int):
        return str(value) if node.type == Type.INT else f"{value}ll"
    return "INFINITY" if math.isinf(value) else f"{value!r}f"


def element(node: Element, indices: Sequence[str]) -> str:
    """What reads an element at these indices, which are texts themselves."""
    return f"read<{C_TYPES[node.type]}>(params.{node.tensor.field}, {_offset(node, indices)})"


def offset(node: Element) -> str:
    """Where an element lies in its tensor, which is contiguous."""
    return _offset(node, [c(index) for index in node.indices])


def _offset(node: Element, indices: Sequence[str]) -> str:
    if not indices:
        return "0"
    first, *rest = indices
    found = first if not rest else f"static_cast<long long>({first})"
    for dimension, index in enumerate(rest, 1):
        found = f"({found} * params.{node.tensor.extent(dimension)} + {index})"
    return found
