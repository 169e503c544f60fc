"""Trees of expressions as flex_trace.py joins them: of operands that are trees, with no place in a text."""

from __future__ import annotations

from functools import reduce

from flashladder.common.errors import ExpressionError
from flashladder.common.expression import Type, typed
from flashladder.common.expression.tree import Binary, Choice, Name, Node, Number, Span, Unary

_MOST_ROWS = 2**29  # of any sequence
_NOWHERE = Span(0, 0)


def _unsayable(_: Span, message: str) -> ExpressionError:
    return ExpressionError(message)


def joined(sign: str, *operands: Node) -> Node:
    """Operands with one sign between each two, from the left."""
    return reduce(lambda left, right: typed.binary(sign, left, right, _NOWHERE, _unsayable), operands)


def signed(sign: str, x: Node) -> Node:
    """-x, !x or ~x."""
    return typed.unary(sign, x, _NOWHERE, _unsayable)


def call(function: str, *arguments: Node) -> Node:
    """One of the language's functions."""
    return typed.call(function, arguments, _NOWHERE, _unsayable)


def choice(condition: Node, yes: Node, no: Node) -> Node:
    """condition ? yes : no."""
    return typed.choice(condition, yes, no, _NOWHERE, _unsayable)


def number(value: float) -> Node:
    """What a number of Python's is. ExpressionError for NaN, and for others that the language has not."""
    if not isinstance(value, (int, float)):
        raise ExpressionError(f"{value} is no number of an expression")
    if isinstance(value, bool):
        return Number(value=value, type=Type.BOOL)
    if value != value:
        raise ExpressionError("NaN is no number of an expression")
    if value < 0:
        return signed("-", number(-value))
    if value == float("inf"):
        return Number(value=value, type=Type.FLOAT)
    return typed.number(repr(value), _NOWHERE, _unsayable)


def value_of(x: Node) -> Node:
    """A number; 1 of what is true."""
    return choice(x, number(1), number(0)) if x.type == Type.BOOL else x


def truth_of(x: Node) -> Node:
    """A truth value; whether a number is not 0."""
    return x if x.type == Type.BOOL else joined("!=", x, number(0))


def _is_positive(x: Node) -> bool:
    """Whether it is surely not below 0: then rounding to 0 is rounding down."""
    match x:
        case Number(value=value):
            return value >= 0
        case Binary(operator="/" | "%", left=left, right=right):
            return _is_positive(left) and _is_positive(right)
    return x in _COUNTED


def most(x: Node) -> int:
    """What a whole number never exceeds, below 0 neither; 2^31 where nothing more is known."""
    match x:
        case Number(value=value):
            return int(value)
        case Binary() if x == ROW:
            return _MOST_ROWS
        case Binary(operator="+" | "-", left=left, right=right):
            return most(left) + most(right)
        case Binary(operator="*", left=left, right=right):
            return most(left) * most(right)
        case Binary(operator="/", left=left):
            return most(left)
        case Binary(operator="%", left=left, right=right):
            return min(most(left), most(right))
        case Unary(operator="-", operand=operand):
            return most(operand)
        case Choice(yes=yes, no=no):
            return max(most(yes), most(no))
    return _MOST_ROWS if x in _COUNTED else 2**31


def floored(a: Node, b: Node) -> Node:
    """The largest whole number below a / b, as Python's a // b."""
    quotient = joined("/", a, b)
    if quotient.type == Type.FLOAT:
        return call("floor", quotient)
    is_up = _is_rounded_up(a, b)
    return joined("-", quotient, value_of(is_up)) if is_up else quotient


def floored_rest(a: Node, b: Node) -> Node:
    """What a // b leaves, as Python's a % b."""
    if Type.FLOAT in (a.type, b.type):
        return joined("-", a, joined("*", floored(a, b), b))
    rest, is_up = joined("%", a, b), _is_rounded_up(a, b)
    if is_up is None:
        return rest
    if isinstance(b, Number) and b.value <= 2**30:
        return joined("%", joined("+", rest, b), b)
    return choice(is_up, joined("+", rest, b), rest)


def _is_rounded_up(a: Node, b: Node) -> Node | None:
    """Whether C's a / b of whole numbers, rounded to 0, is above the quotient; None: never."""
    if _is_positive(a) and _is_positive(b):
        return None
    rest, zero = joined("%", a, b), number(0)
    if _is_positive(b):
        return joined("<", rest, zero)
    differ = joined("!=", joined("<", rest, zero), joined("<", b, zero))
    return joined("&&", joined("!=", rest, zero), differ)


SCORE = Name(name="s", type=Type.FLOAT)
_B, _H, POSITION, _K, _ROWS, _KEYS = (Name(name=x, type=Type.INT) for x in ("b", "h", "q", "k", "seqlen_q", "seqlen_k"))
# Rows count from 0 in torch, however many keys come before the first.
ROW = joined("-", POSITION, joined("-", _KEYS, _ROWS))
PLACES = (_B, _H, ROW, _K)
_COUNTED = (*PLACES, POSITION)  # who traces by positions has no more rows than keys
