"""What a score's tree grows by where one of its parts does, as a tree: by s, or by an element that it reads.

Whole numbers and truth values do not grow, nor does what jumps from one whole number to the next. At a kink it is as in
torch: of `min` and `max` of equals that of the first, of `abs` at 0 it is 0. Conditions stay where they are, so that
nothing is read that the score does not read.
"""

from __future__ import annotations

from collections.abc import Callable

from flashladder.common.expression.tree import Binary, Call, Choice, Node, Number, Type, Unary

ZERO, ONE, _MINUS_ONE = (Number(value=value, type=Type.FLOAT) for value in (0.0, 1.0, -1.0))
_LN_2 = Number(value=0.6931471824645996, type=Type.FLOAT)  # as fp32 has it


def derivative(node: Node, by: Node) -> Node:
    """d node / d by, where `by` is a name or an element; ZERO where it does not depend on it."""
    if node == by:
        return ONE
    if node.type != Type.FLOAT:
        return ZERO
    match node:
        case Unary(operand=operand):
            return _negative(derivative(operand, by))
        case Binary(left=left, right=right):
            return _of_binary(node, derivative(left, by), derivative(right, by))
        case Choice(condition=condition, yes=yes, no=no):
            return _choice(condition, derivative(yes, by), derivative(no, by))
        case Call(function="min" | "max" as function, arguments=(first, second)):
            is_first = _truth("<=" if function == "min" else ">=", first, second)
            if second.type == Type.FLOAT and not isinstance(second, Number):  # both pass over a NaN
                is_first = _truth("||", is_first, _truth("!=", second, second))
            return _choice(is_first, derivative(first, by), derivative(second, by))
        case Call(function=function, arguments=(of,)) if (inner := derivative(of, by)) != ZERO:
            return _CHAINED[function](node, of, inner)
    return ZERO


def _of_binary(node: Binary, left: Node, right: Node) -> Node:
    """Of a sum, difference, product or quotient, whose operands have these derivatives."""
    match node.operator:
        case "+":
            return _sum(left, right)
        case "-":
            return _sum(left, _negative(right))
        case "*":
            return _sum(_product(left, node.right), _product(node.left, right))
        case "/":
            return _quotient(_sum(left, _negative(_product(node, right))), node.right)
    raise TypeError(node)


def _square(x: Node) -> Node:
    return _product(x, x)


def _call(function: str, of: Node) -> Node:
    return Call(function=function, arguments=(of,), type=Type.FLOAT)


def _flat(*_: Node) -> Node:
    return ZERO


# Each takes its call, what that is of, and the derivative of this.
_CHAINED: dict[str, Callable[[Node, Node, Node], Node]] = {
    "abs": lambda _, x, dx: _choice(
        _truth("<", x, ZERO), _negative(dx), _choice(_truth(">", x, ZERO), dx, ZERO)
    ),
    "float": lambda _, x, dx: dx,
    "floor": _flat,
    "ceil": _flat,
    "sqrt": lambda y, x, dx: _quotient(dx, _sum(y, y)),
    "exp": lambda y, x, dx: _product(dx, y),
    "exp2": lambda y, x, dx: _product(_product(dx, _LN_2), y),
    "log": lambda _, x, dx: _quotient(dx, x),
    "log2": lambda _, x, dx: _quotient(dx, _product(_LN_2, x)),
    "tanh": lambda y, x, dx: _product(dx, _sum(ONE, _negative(_square(y)))),
    "sin": lambda _, x, dx: _product(dx, _call("cos", x)),
    "cos": lambda _, x, dx: _negative(_product(dx, _call("sin", x))),
}  # fmt: skip


# -- nodes of fp32, without what a sum with 0 and a product with 0 or 1 would be


def _sum(first: Node, second: Node) -> Node:
    if first == ZERO:
        return second
    if second == ZERO:
        return first
    if isinstance(second, Unary) and second.type == Type.FLOAT:
        return Binary(operator="-", left=first, right=second.operand, type=Type.FLOAT)
    return Binary(operator="+", left=first, right=second, type=Type.FLOAT)


def _negative(x: Node) -> Node:
    if isinstance(x, Number):
        return x if x == ZERO else Number(value=-x.value, type=Type.FLOAT)
    if isinstance(x, Unary) and x.type == Type.FLOAT:
        return x.operand
    return Unary(operator="-", operand=x, type=Type.FLOAT)


def _product(first: Node, second: Node) -> Node:
    if ZERO in (first, second):
        return ZERO
    if first == ONE:
        return second
    if second == ONE:
        return first
    if first == _MINUS_ONE:
        return _negative(second)
    return Binary(operator="*", left=first, right=second, type=Type.FLOAT)


def _quotient(first: Node, second: Node) -> Node:
    return ZERO if first == ZERO else Binary(operator="/", left=first, right=second, type=Type.FLOAT)


def _truth(operator: str, first: Node, second: Node) -> Node:
    return Binary(operator=operator, left=first, right=second, type=Type.BOOL)


def _choice(condition: Node, yes: Node, no: Node) -> Node:
    return yes if yes == no else Choice(condition=condition, yes=yes, no=no, type=Type.FLOAT)
