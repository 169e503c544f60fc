"""An expression as a tree, each node with its type: a truth value, a whole number, or a number of fp32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple


class Type(IntEnum):
    """Of a value; of two in arithmetic the higher one is that of the result."""

    BOOL = 0
    INT = 1  # 32 bits
    LONG = 2  # 64 bits: elements of int64 tensors, and what is reckoned with them
    FLOAT = 3  # fp32

    @property
    def words(self) -> str:
        """For errors."""
        return ("a truth value", "a whole number", "a whole number", "a number of fp32")[self]

    @property
    def is_whole(self) -> bool:
        """Whether bits can be taken of it."""
        return self in (Type.INT, Type.LONG)


POSITIONS = ("b", "h", "q", "k")  # of an element of S
SIZES = ("seqlen_q", "seqlen_k")
SCORE = "s"
DTYPES = {  # of named tensors, and what their elements are in an expression
    "bool": Type.BOOL,
    "uint8": Type.INT,
    "int8": Type.INT,
    "int16": Type.INT,
    "int32": Type.INT,
    "int64": Type.LONG,
    "fp16": Type.FLOAT,
    "bf16": Type.FLOAT,
    "fp32": Type.FLOAT,
    "fp64": Type.FLOAT,  # rounded
}


@dataclass(frozen=True, order=True)
class Declared:
    """A named tensor, as far as a kernel is compiled for it."""

    name: str
    dtype: str  # of DTYPES
    rank: int  # how many indices it takes

    @property
    def field(self) -> str:
        """Its name among a kernel's parameters, and among a problem's tensors: no other begins so."""
        return f"of_{self.name}"

    @property
    def gradient(self) -> str:
        """That of its gradient."""
        return f"d_{self.field}"

    @property
    def count(self) -> str:
        """That of the number of its elements."""
        return f"count_{self.field}"

    def extent(self, dimension: int) -> str:
        """That of its size along a dimension."""
        return f"extent_{dimension}_of_{self.name}"


class Span(NamedTuple):
    """Where in its text a part of an expression stands."""

    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Node:
    """A part of an expression; parts that differ in nothing but their place are equal."""

    type: Type
    span: Span = field(default=Span(0, 0), compare=False)

    @property
    def parts(self) -> tuple[Node, ...]:
        """Of which it is made."""
        return ()


@dataclass(frozen=True, kw_only=True)
class Number(Node):
    """`true`, `7`, `0.5`, `inf`; one of fp32 is rounded to it."""

    value: bool | int | float


@dataclass(frozen=True, kw_only=True)
class Name(Node):
    """One of POSITIONS, SIZES, or SCORE."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Element(Node):
    """An element of a named tensor."""

    tensor: Declared
    indices: tuple[Node, ...]

    @property
    def parts(self) -> tuple[Node, ...]:
        return self.indices


@dataclass(frozen=True, kw_only=True)
class Unary(Node):
    """`-x`, `!x`, `~x`."""

    operator: str
    operand: Node

    @property
    def parts(self) -> tuple[Node, ...]:
        return (self.operand,)


@dataclass(frozen=True, kw_only=True)
class Binary(Node):
    """`x + y`, `x <= y`, `x && y`, ..."""

    operator: str
    left: Node
    right: Node

    @property
    def parts(self) -> tuple[Node, ...]:
        return self.left, self.right


@dataclass(frozen=True, kw_only=True)
class Choice(Node):
    """`condition ? yes : no`."""

    condition: Node
    yes: Node
    no: Node

    @property
    def parts(self) -> tuple[Node, ...]:
        return self.condition, self.yes, self.no


@dataclass(frozen=True, kw_only=True)
class Call(Node):
    """A function of numbers."""

    function: str
    arguments: tuple[Node, ...]

    @property
    def parts(self) -> tuple[Node, ...]:
        return self.arguments


def walk(node: Node) -> Iterator[Node]:
    """A node and all below it."""
    yield node
    for part in node.parts:
        yield from walk(part)


def names(node: Node) -> set[str]:
    """The positions, sizes and the score that it reads."""
    return {part.name for part in walk(node) if isinstance(part, Name)}


def depth_of(node: Node) -> int:
    """How many nodes lie on the longest way down. It needs no deep stack."""
    depth, level = 0, [node]
    while level:
        depth, level = depth + 1, [part for each in level for part in each.parts]
    return depth
