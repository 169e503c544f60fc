"""What a tree comes to, by torch: the exact reference, and the check of what it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashladder.common.errors import ExpressionError
from flashladder.common.expression.tree import Binary, Call, Choice, Element, Name, Node, Number, Type, Unary

TORCH_DTYPES = {name: getattr(torch, name) for name in ("bool", "uint8", "int8", "int16", "int32", "int64")}
TORCH_DTYPES |= {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}

Values = Mapping[str, torch.Tensor]
_BITS = {Type.INT: 32, Type.LONG: 64}
_COMPARISONS: dict[str, Callable[..., torch.Tensor]] = {
    "==": torch.eq, "!=": torch.ne, "<=": torch.le, ">=": torch.ge, "<": torch.lt, ">": torch.gt,
}  # fmt: skip
_BITWISE: dict[str, Callable[..., torch.Tensor]] = {
    "|": torch.bitwise_or, "^": torch.bitwise_xor, "&": torch.bitwise_and,
}  # fmt: skip
_ARITHMETIC: dict[str, Callable[..., torch.Tensor]] = {"+": torch.add, "-": torch.sub, "*": torch.mul}
_FLOATS: dict[str, Callable[..., torch.Tensor]] = {
    name: getattr(torch, name) for name in ("floor", "ceil", "sqrt", "exp", "exp2", "log", "log2", "tanh", "sin", "cos")
}


class Evaluator:
    """Evaluates trees of one text over positions, sizes and tensors by their names, all of shapes that broadcast.

    Whole numbers are reckoned exactly as kernels do, others in `dtype`. What is behind && or ||, or not chosen, is not
    read, and has no gradient. ExpressionError where an index is outside its tensor, for the first such place.
    """

    def __init__(
        self, values: Values, tensors: Values, dtype: torch.dtype = torch.float32, what: str = "mask", text: str = ""
    ) -> None:
        self._values, self._tensors, self._dtype = values, tensors, dtype
        self._what, self._text = what, text
        self._device = values["q"].device

    def value(self, node: Node, needed: torch.Tensor | None = None) -> torch.Tensor:
        """Bool, int64 or `dtype`. Only where it is `needed` are indices looked at; None: everywhere."""
        match node:
            case Number(value=value):
                kind = {bool: torch.bool, int: torch.int64, float: self._dtype}[type(value)]
                return torch.tensor(value, dtype=kind, device=self._device)
            case Name(name=name):
                return _growing(self._values[name], needed)
            case Element():
                return self._element(node, needed)
            case Unary(operator=operator, operand=operand):
                of = self.value(operand, needed)
                if operator == "!":
                    return ~of
                return self._wrapped(node.type, ~of if operator == "~" else -self._as(node.type, of))
            case Binary(operator="&&" | "||" as operator, left=left, right=right):
                first = self.value(left, needed)
                second = self.value(right, _both(needed, first if operator == "&&" else ~first))
                return first & second if operator == "&&" else first | second
            case Binary():
                return self._binary(node, self.value(node.left, needed), self.value(node.right, needed))
            case Choice(condition=condition, yes=yes, no=no):
                chosen = self.value(condition, needed)
                first = self._as(node.type, self.value(yes, _both(needed, chosen)))
                second = self._as(node.type, self.value(no, _both(needed, ~chosen)))
                return torch.where(chosen, first, second)
            case Call():
                return self._call(node, [self.value(each, needed) for each in node.arguments])
        raise TypeError(node)

    def _as(self, kind: Type, x: torch.Tensor) -> torch.Tensor:
        return x.to({Type.BOOL: torch.bool, Type.FLOAT: self._dtype}.get(kind, torch.int64))

    def _wrapped(self, kind: Type, x: torch.Tensor) -> torch.Tensor:
        """Whole numbers of 32 bits that grew beyond them, as processors keep them."""
        return ((x + 2**31) & (2**32 - 1)) - 2**31 if kind == Type.INT else x

    def _binary(self, node: Binary, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        operator, kind = node.operator, node.type
        if operator in ("<<", ">>"):
            by = right & (_BITS[kind] - 1)
            return self._wrapped(kind, left << by if operator == "<<" else left >> by)
        if operator in _COMPARISONS:
            wide = max(node.left.type, node.right.type)
            return _COMPARISONS[operator](self._as(wide, left), self._as(wide, right))
        left, right = self._as(kind, left), self._as(kind, right)
        if operator in _BITWISE:
            return _BITWISE[operator](left, right)
        if operator in _ARITHMETIC:
            return self._wrapped(kind, _ARITHMETIC[operator](left, right))
        if kind == Type.FLOAT:
            return left / right
        return self._wrapped(kind, _divided(operator, left, right))

    def _call(self, node: Call, arguments: list[torch.Tensor]) -> torch.Tensor:
        name, kind = node.function, node.type
        if name == "int":
            (x,) = arguments
            if x.is_floating_point():
                x = x.nan_to_num(0.0).double().trunc().clamp(-(2.0**31), 2.0**31 - 1).long()
            return self._wrapped(kind, x.long())
        alike = [self._as(kind, x) for x in arguments]
        if name in ("min", "max"):
            of_floats, of_whole = (torch.fmin, torch.minimum) if name == "min" else (torch.fmax, torch.maximum)
            return (of_floats if kind == Type.FLOAT else of_whole)(*alike)
        if name == "abs":
            return self._wrapped(kind, alike[0].abs())
        return alike[0] if name == "float" else _FLOATS[name](alike[0])

    def index(self, node: Element, dimension: int, needed: torch.Tensor | None = None) -> torch.Tensor:
        """That of an element along one dimension; ExpressionError where it is `needed` and outside."""
        which, extent = node.indices[dimension], self._tensors[node.tensor.name].shape[dimension]
        found = self._wrapped(which.type, self.value(which, needed).long())
        outside = _both(needed, (found < 0) | (found >= extent))
        if outside.any():
            raise self._outside(node, dimension, found, outside, extent)
        return found

    def _element(self, node: Element, needed: torch.Tensor | None) -> torch.Tensor:
        tensor = self._tensors[node.tensor.name]
        indices = [self.index(node, dimension, needed) for dimension in range(node.tensor.rank)]
        read = tensor[tuple(index.clamp(0, extent - 1) for index, extent in zip(indices, tensor.shape, strict=True))]
        return self._as(node.type, _growing(read.float(), needed) if read.is_floating_point() else read)

    def _outside(
        self, node: Element, dimension: int, index: torch.Tensor, outside: torch.Tensor, extent: int
    ) -> ExpressionError:
        """What the first read beyond a tensor is refused with."""
        index, where, *places = torch.broadcast_tensors(index, outside, *(self._values[name] for name in "bhqk"))
        first = int(where.reshape(-1).int().argmax())
        at = ", ".join(f"{name}={int(x.reshape(-1)[first])}" for name, x in zip("bhqk", places, strict=True))
        number = ("first", "second", "third", "fourth")[dimension] if node.tensor.rank > 1 else "only"
        message = (
            f"{node.tensor.name} has {extent} elements along its {number} dimension, and at {at} its index is "
            f"{int(index.reshape(-1)[first])}"
        )
        return ExpressionError.at(self._what, self._text, node.indices[dimension].span, message)


def _growing(x: torch.Tensor, needed: torch.Tensor | None) -> torch.Tensor:
    """The same, whose gradient is 0 where it is not needed: NaN may come of it there."""
    return x if needed is None or not x.requires_grad else torch.where(needed, x, x.detach())


def _both(needed: torch.Tensor | None, where: torch.Tensor) -> torch.Tensor:
    return where if needed is None else needed & where


def _divided(operator: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Whole numbers, towards 0; by 0 it gives 0, and by -1 it never leaves the processor's range."""
    is_special = (right == 0) | (right == -1)
    by = right.masked_fill(is_special, 1)
    if operator == "%":
        return torch.fmod(left, by).masked_fill(is_special, 0)
    quotient = torch.div(left, by, rounding_mode="trunc")
    return torch.where(right == 0, 0, torch.where(right == -1, -left, quotient))


def evaluate(node: Node, values: Values, tensors: Values, **how: Any) -> torch.Tensor:
    """`Evaluator.value` of a whole tree."""
    return Evaluator(values, tensors, **how).value(node)
