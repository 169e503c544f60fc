"""A rule over configuration fields: an expression that must hold, and why."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import CodeType

from flashladder.common.errors import ConfigError

# What an expression may be made of: arithmetic, comparison and logic over names and constants; no calls, no attributes.
ALLOWED_NODES = (
    ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp, ast.Add, ast.Sub, ast.Mult,
    ast.FloorDiv, ast.Mod, ast.BitAnd, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In,
    ast.NotIn, ast.Tuple, ast.IfExp, ast.Name, ast.Load, ast.Constant,
)  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """`require` is a Python expression over field names; `why` completes "because ..."."""

    require: str
    why: str

    @cached_property
    def _tree(self) -> ast.Expression:
        try:
            tree = ast.parse(self.require, mode="eval")
        except SyntaxError as error:
            raise ConfigError(f"the rule {self.require!r} is not a Python expression: {error.msg}") from None
        for node in ast.walk(tree):
            if not isinstance(node, ALLOWED_NODES):
                raise ConfigError(
                    f"the rule {self.require!r} contains {type(node).__name__}; rules may use field names, constants, "
                    "arithmetic, comparisons, and/or/not"
                )
        return tree

    @cached_property
    def _code(self) -> CodeType:
        return compile(self._tree, "<rule>", "eval")

    @cached_property
    def names(self) -> frozenset[str]:
        """The fields that the expression reads."""
        return frozenset(node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name))

    def holds(self, values: Mapping[str, object]) -> bool:
        """Whether the expression is true; a rule about a field that is not among `values` does not apply."""
        if not self.names <= values.keys():
            return True
        return bool(eval(self._code, {"__builtins__": {}}, dict(values)))
