"""Arithmetic as text: a rule over configuration fields and why it holds, or a size that depends on the problem."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import CodeType
from typing import Any

from flashladder.common.errors import ConfigError

# What an expression may be made of: arithmetic, comparison and logic over names and constants; no attributes.
ALLOWED_NODES = (
    ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp, ast.Add, ast.Sub, ast.Mult,
    ast.FloorDiv, ast.Mod, ast.BitAnd, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In,
    ast.NotIn, ast.Tuple, ast.IfExp, ast.Name, ast.Load, ast.Constant, ast.Call,
)  # fmt: skip
FUNCTIONS: dict[str, Callable[..., int]] = {"cdiv": lambda a, b: -(-a // b), "min": min, "max": max}


@dataclass(frozen=True)
class Expression:
    """A Python expression over names, whose value anybody may ask for: it can do nothing but reckon.

    `cdiv(a, b)` is a / b, rounded up. ConfigError, naming `what` it is, where it is made of anything else.
    """

    text: str
    what: str = "expression"

    @cached_property
    def _tree(self) -> ast.Expression:
        try:
            tree = ast.parse(self.text.strip(), mode="eval")
        except SyntaxError as error:
            raise ConfigError(f"the {self.what} {self.text!r} is not a Python expression: {error.msg}") from None
        for node in ast.walk(tree):
            is_unknown_call = isinstance(node, ast.Call) and getattr(node.func, "id", None) not in FUNCTIONS
            if is_unknown_call or not isinstance(node, ALLOWED_NODES):
                raise ConfigError(
                    f"the {self.what} {self.text!r} contains {type(node).__name__}; it may use names, constants, "
                    f"arithmetic, comparisons, and/or/not, {', '.join(FUNCTIONS)}"
                )
        return tree

    @cached_property
    def _code(self) -> CodeType:
        return compile(self._tree, f"<{self.what}>", "eval")

    @cached_property
    def names(self) -> frozenset[str]:
        """The names that it reads."""
        return frozenset(node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name)) - FUNCTIONS.keys()

    def __reduce__(self) -> tuple[type[Expression], tuple[str, str]]:
        return type(self), (self.text, self.what)  # code cannot be sent to another process

    def value(self, values: Mapping[str, object]) -> Any:
        """What it comes to. ConfigError for a name that has no value."""
        self._check_names(values)
        return eval(self._code, {"__builtins__": {}}, {**FUNCTIONS, **values})

    def function(self, names: Sequence[str], known: Mapping[str, object]) -> Callable[..., Any]:
        """The same as a function of these names in their order, for what is asked often; the others are known."""
        self._check_names([*names, *known])
        arguments = ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])
        made = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, self._tree.body)))
        function: Callable[..., Any] = eval(
            compile(made, f"<{self.what}>", "eval"), {"__builtins__": {}, **FUNCTIONS, **known}
        )
        return function

    def _check_names(self, known: Collection[str]) -> None:
        if unknown := self.names.difference(known):
            there = ", ".join(sorted(known))
            raise ConfigError(f"the {self.what} {self.text!r} reads {', '.join(sorted(unknown))}; there are {there}")


@dataclass(frozen=True)
class Rule:
    """`require` is an expression over field names; `why` completes "because ..."."""

    require: str
    why: str

    @cached_property
    def _expression(self) -> Expression:
        return Expression(self.require, "rule")

    @property
    def names(self) -> frozenset[str]:
        """The fields that the expression reads."""
        return self._expression.names

    def holds(self, values: Mapping[str, object]) -> bool:
        """Whether the expression is true; a rule about a field that is not among `values` does not apply."""
        return not self.names <= values.keys() or bool(self._expression.value(values))
