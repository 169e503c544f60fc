"""Text -> tree. What is refused is shown in the text, with a caret under it.

C's operators and their order, over the positions b (batch), h (head of Q), q and k, the sizes seqlen_q and seqlen_k,
in a score also s; elements of named tensors, `bias[h][q][k]` or `bias[h, q, k]`; functions; numbers, true, false, inf.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from flashladder.common.errors import ExpressionError, instead
from flashladder.common.expression import typed
from flashladder.common.expression.tree import (
    DTYPES,
    POSITIONS,
    SCORE,
    SIZES,
    Declared,
    Element,
    Name,
    Node,
    Number,
    Span,
    Type,
    depth_of,
    names,
)

MOST_BRACKETS, MOST_DEPTH = 40, 100  # of an expression: room for any that a person writes
CONSTANTS = {"true": (True, Type.BOOL), "false": (False, Type.BOOL), "inf": (math.inf, Type.FLOAT)}
RESERVED = frozenset({*POSITIONS, *SIZES, SCORE, *CONSTANTS, *typed.FUNCTIONS})  # no names of tensors
_TOKEN = re.compile(
    r"(?P<number>0[xX][0-9a-fA-F]+|(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?)"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<sign>\|\||&&|==|!=|<=|>=|<<|>>|[-+*/%<>&|^!~?:,()\[\]])",
    re.ASCII,
)
_PYTHON = {"and": "&&", "or": "||", "not": "!", "if": "?:", "else": "?:", "True": "true", "False": "false"}


class Token(NamedTuple):
    """A word of the text; the last one has no kind."""

    kind: str
    text: str
    span: Span


def mask(text: str, tensors: Mapping[str, Declared] | None = None) -> Node:
    """Which keys a row sees: an expression that gives a truth value. ExpressionError for any other text."""
    parser = _Parser("mask", text, tensors or {}, (*POSITIONS, *SIZES))
    node = parser.whole()
    if node.type != Type.BOOL:
        raise parser.refuse(
            node.span, f"a mask is a truth value, and this is {node.type.words}; compare it, as in `x != 0`"
        )
    return node


def score(text: str, tensors: Mapping[str, Declared] | None = None) -> Node:
    """What a score s becomes: an expression that gives a number. ExpressionError for any other text."""
    parser = _Parser("score", text, tensors or {}, (*POSITIONS, *SIZES, SCORE))
    node = parser.whole()
    if node.type == Type.BOOL:
        raise parser.refuse(node.span, "a score is a number, and this is a truth value; choose by it: `x ? s : -inf`")
    return node


class _Parser:
    def __init__(self, what: str, text: str, tensors: Mapping[str, Declared], names: Sequence[str]) -> None:
        self._what, self._text, self._tensors, self._names = what, text, tensors, names
        self._brackets = self._at = 0
        self._tokens = self._read()

    def refuse(self, span: Span, message: str) -> ExpressionError:
        """The error that shows a place in the text."""
        return ExpressionError.at(self._what, self._text, span, message)

    def whole(self) -> Node:
        """All of the text."""
        node = self._choice()
        if (rest := self._token).kind:
            word = f"; in C it is {_PYTHON[rest.text]}" if rest.text in _PYTHON else ""
            raise self.refuse(rest.span, f"the expression ends before this{word}")
        if (depth := depth_of(node)) > MOST_DEPTH:
            raise self.refuse(
                node.span, f"{depth} operations wait for each other, more than {MOST_DEPTH}: use a tensor"
            )
        return node

    def _read(self) -> list[Token]:
        tokens, at = [], 0
        while at < len(self._text):
            if self._text[at].isspace():
                at += 1
                continue
            found = _TOKEN.match(self._text, at)
            if not found or found.lastgroup is None:
                hint = "; equality is ==" if self._text[at] == "=" else ""
                raise self.refuse(Span(at, at + 1), f"no expression has this{hint}")
            tokens.append(Token(found.lastgroup, found[0], Span(at, found.end())))
            at = found.end()
        return [*tokens, Token("", "", Span(len(self._text), len(self._text) + 1))]

    @property
    def _token(self) -> Token:
        return self._tokens[self._at]

    def _take(self, *texts: str) -> Token | None:
        """The next token if it is one of these signs."""
        token = self._token
        if token.kind != "sign" or token.text not in texts:
            return None
        self._at += 1
        return token

    def _expect(self, text: str, opened: Token) -> Token:
        if found := self._take(text):
            return found
        raise self.refuse(
            self._token.span, f"here {text} should follow, for the {opened.text} at {opened.span.begin + 1}"
        )

    def _choice(self) -> Node:
        self._brackets += 1
        if self._brackets > MOST_BRACKETS:
            raise self.refuse(self._token.span, f"parts lie in parts, more than {MOST_BRACKETS} deep; write it flatter")
        node = self._binary(1)
        if mark := self._take("?"):
            yes = self._choice()
            self._expect(":", mark)
            no = self._choice()
            node = typed.choice(node, yes, no, _over(node, no), self.refuse)
        self._brackets -= 1
        return node

    def _binary(self, loosest: int) -> Node:
        node = self._unary()
        while (level := self._level()) >= loosest:
            sign = self._token.text
            self._at += 1
            right = self._binary(level + 1)
            node = typed.binary(sign, node, right, _over(node, right), self.refuse)
        return node

    def _level(self) -> int:
        """How tightly the next token binds as an operator between two; 0 if it is none."""
        token = self._token
        return typed.TIGHTNESS.get(token.text, 0) if token.kind == "sign" else 0

    def _unary(self) -> Node:
        signs = []
        while sign := self._take("-", "+", "!", "~"):
            signs.append(sign)
        node = self._primary()
        for sign in reversed(signs):
            if sign.text != "+":
                node = typed.unary(sign.text, node, Span(sign.span.begin, node.span.end), self.refuse)
        return node

    def _primary(self) -> Node:
        token = self._token
        self._at += bool(token.kind)
        if token.kind == "number":
            return typed.number(token.text, token.span, self.refuse)
        if token.kind == "name":
            return self._named(token)
        if token.text == "(":
            node = self._choice()
            return replace(node, span=Span(token.span.begin, self._expect(")", token).span.end))
        raise self.refuse(token.span, "here a value should stand" + (f", not {token.text}" if token.text else ""))

    def _named(self, token: Token) -> Node:
        name = token.text
        if name in typed.FUNCTIONS:
            return self._call(token)
        if name in CONSTANTS:
            value, kind = CONSTANTS[name]
            return Number(value=value, type=kind, span=token.span)
        if name in self._names:
            if self._token.text == "[":
                raise self.refuse(token.span, f"{name} is a number, and takes no index")
            return Name(name=name, type=Type.FLOAT if name == SCORE else Type.INT, span=token.span)
        if name in self._tensors:
            return self._element(token, self._tensors[name])
        if name == SCORE:
            raise self.refuse(token.span, "s is the score, which a mask does not know")
        if name in _PYTHON:
            raise self.refuse(token.span, f"in C it is {_PYTHON[name]}")
        known = [*self._names, *self._tensors, *typed.FUNCTIONS, *CONSTANTS]
        raise self.refuse(token.span, f"no name {name}{instead(name, known)}")

    def _call(self, token: Token) -> Node:
        opened = self._take("(")
        if not opened:
            raise self.refuse(token.span, f"{token.text} is a function: {token.text}(...)")
        arguments: list[Node] = []
        while not (closed := self._take(")")):
            if arguments and not self._take(","):
                self._expect(")", opened)
            arguments.append(self._choice())
        return typed.call(token.text, arguments, Span(token.span.begin, closed.span.end), self.refuse)

    def _element(self, token: Token, tensor: Declared) -> Node:
        indices: list[Node] = []
        end = token.span.end
        while opened := self._take("["):
            indices.append(self._choice())
            while self._take(","):
                indices.append(self._choice())
            end = self._expect("]", opened).span.end
        for index in indices:
            if not index.type.is_whole:
                raise self.refuse(index.span, f"this is {index.type.words}; an index is a whole number")
            if SCORE in names(index):
                raise self.refuse(
                    index.span, "an index that depends on the score s is in no bounds; it may be of positions"
                )
        span = Span(token.span.begin, end)
        if len(indices) != tensor.rank:
            wanted = typed.counted(tensor.rank, "dimension")
            raise self.refuse(span, f"{tensor.name} has {wanted}, and this names {len(indices) or 'none'}")
        return Element(tensor=tensor, indices=tuple(indices), type=DTYPES[tensor.dtype], span=span)


def _over(first: Node, last: Node) -> Span:
    return Span(first.span.begin, last.span.end)
