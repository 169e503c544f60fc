"""What may stand beside what, and the type of the result: nodes of checked operands."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashladder.common.errors import ExpressionError
from flashladder.common.expression.tree import Binary, Call, Choice, Node, Number, Span, Type, Unary

LOGIC, EQUALITY, ORDER = ("||", "&&"), ("==", "!="), ("<=", ">=", "<", ">")
BITS, SHIFTS = ("|", "^", "&"), ("<<", ">>")
# By how tightly they bind, in C's order, the loosest first; all from the left.
LEVELS = (("||",), ("&&",), ("|",), ("^",), ("&",), EQUALITY, ORDER, SHIFTS, ("+", "-"), ("*", "/", "%"))
TIGHTNESS = {operator: level for level, operators in enumerate(LEVELS, 1) for operator in operators}
MOST_INT, MOST_LONG = 2**31 - 1, 2**63 - 1

Refuse = Callable[[Span, str], ExpressionError]


@dataclass(frozen=True)
class Function:
    """How many numbers it takes, and its result: of one type, or as the highest of its arguments."""

    arguments: int
    result: Type | None = None


FUNCTIONS = {
    **dict.fromkeys(("min", "max"), Function(2)),
    "abs": Function(1),
    "int": Function(1, Type.INT),
    **dict.fromkeys(("float", "floor", "ceil", "sqrt", "exp", "exp2", "log", "log2"), Function(1, Type.FLOAT)),
    **dict.fromkeys(("tanh", "sin", "cos"), Function(1, Type.FLOAT)),
}


def number(text: str, span: Span, refuse: Refuse) -> Number:
    """What digits stand for: a whole number of 32 bits, or of 64 if it is larger, or fp32."""
    is_hex = text[:2].lower() == "0x"
    if is_hex or text.isdigit():
        value = int(text, 16 if is_hex else 10)
        if value > MOST_LONG:
            raise refuse(span, "a whole number has at most 64 bits")
        return Number(value=value, type=Type.INT if value <= MOST_INT else Type.LONG, span=span)
    rounded = fp32(float(text))
    if math.isinf(rounded):
        raise refuse(span, "fp32 has no number as large; write inf")
    return Number(value=rounded, type=Type.FLOAT, span=span)


def fp32(value: float) -> float:
    """The nearest number of fp32."""
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return float(rounded)


def unary(operator: str, operand: Node, span: Span, refuse: Refuse) -> Unary:
    """-x, !x or ~x."""
    if operator == "!":
        _require_truth(operand, refuse)
        return Unary(operator=operator, operand=operand, type=Type.BOOL, span=span)
    if operator == "~" and not operand.type.is_whole:
        hint = "; write ! for its opposite" if operand.type == Type.BOOL else ""
        raise refuse(operand.span, f"this is {operand.type.words}; ~ takes the bits of a whole number{hint}")
    return Unary(operator=operator, operand=operand, type=max(operand.type, Type.INT), span=span)


def binary(operator: str, left: Node, right: Node, span: Span, refuse: Refuse) -> Binary:
    """Two operands beside an operator of LEVELS."""
    both = left, right
    if operator in LOGIC:
        for operand in both:
            _require_truth(operand, refuse)
        kind = Type.BOOL
    elif operator in EQUALITY:
        if (left.type == Type.BOOL) != (right.type == Type.BOOL):
            raise refuse(span, f"{left.type.words} beside {right.type.words}: they are never compared")
        kind = Type.BOOL
    elif operator in ORDER:
        for operand in both:
            if operand.type == Type.BOOL:
                raise refuse(operand.span, f"this is a truth value; {operator} takes numbers: join two by &&")
        kind = Type.BOOL
    elif operator in BITS and left.type == right.type == Type.BOOL:
        kind = Type.BOOL
    elif operator in (*BITS, *SHIFTS, "%"):
        for operand in both:
            if not operand.type.is_whole:
                raise refuse(operand.span, f"this is {operand.type.words}; {operator} takes whole numbers")
        kind = left.type if operator in SHIFTS else max(left.type, right.type)
    else:
        kind = max(left.type, right.type, Type.INT)
    return Binary(operator=operator, left=left, right=right, type=kind, span=span)


def choice(condition: Node, yes: Node, no: Node, span: Span, refuse: Refuse) -> Choice:
    """condition ? yes : no."""
    _require_truth(condition, refuse)
    if (yes.type == Type.BOOL) != (no.type == Type.BOOL):
        raise refuse(span, f"{yes.type.words} or else {no.type.words}: both should be numbers, or truth values")
    return Choice(condition=condition, yes=yes, no=no, type=max(yes.type, no.type), span=span)


def call(function: str, arguments: Sequence[Node], span: Span, refuse: Refuse) -> Call:
    """A function of FUNCTIONS."""
    declared = FUNCTIONS[function]
    if len(arguments) != declared.arguments:
        raise refuse(span, f"{function} takes {counted(declared.arguments, 'argument')}, not {len(arguments)}")
    kind = max(Type.INT, *(argument.type for argument in arguments))
    if declared.result is not None:
        kind = declared.result
    return Call(function=function, arguments=tuple(arguments), type=kind, span=span)


def counted(count: int, what: str) -> str:
    """1 argument, 2 arguments: as errors say it."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def _require_truth(node: Node, refuse: Refuse) -> None:
    if node.type != Type.BOOL:
        raise refuse(node.span, f"this is {node.type.words}, no truth value; compare it, as in `x != 0`")
