"""The mutants of a file: small changes of Python, by its syntax tree, and of device code, by its lines."""

import ast
import bisect
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
OF_PYTHON = COMPARISONS | {"in": "not in", "not in": "in", "is": "is not", "is not": "is", "and": "or", "or": "and"}
OF_PYTHON |= {
    "+": "-",
    "-": "+",
    "*": "+",
    "/": "*",
    "//": "*",
    "%": "//",
    "**": "*",
    "<<": ">>",
    ">>": "<<",
    "&": "|",
    "|": "&",
}
OF_DEVICE = COMPARISONS | {"&&": "||", "||": "&&", "+": "-", "-": "+", "*": "+", "/": "*", "%": "/", "<<": ">>"}
DROPPED = "(nothing)"

# Operators of device code stand between blanks; those of templates do not.
_OPERATOR = re.compile(r"(?<= )(<=|>=|==|!=|<<|&&|\|\||[-<>+*/%])(?= )")
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")
_CLAMP = re.compile(r"\bf?(min|max)f?(?=\()")
_ORDER = re.compile(
    r"^ *(?:\w+(?:\.|->))*\w*(?:sync|fence|barrier|wait|arrive|commit|release|clamp|zero)\w*(?:<.*>)?\(.*\);$",
    re.MULTILINE,
)
_UNREAD = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|^ *(?:#|static_assert|template)[^\n]*', re.MULTILINE | re.DOTALL
)


class Change(NamedTuple):
    """Bytes of a file, and what stands there instead."""

    begin: int
    end: int
    new: str


@dataclass(frozen=True)
class Mutant:
    """One change of one file. `path` is relative to the repository."""

    path: str
    change: Change
    line: int
    old_line: str
    new_line: str

    @property
    def name(self) -> str:
        """The same wherever the lines stand in the file, and the file's room in the house."""
        return f"{'/'.join(self.path.split('/')[-2:])}: {self.old_line} -> {self.new_line}"

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.old_line} -> {self.new_line}"

    def applied(self, text: bytes) -> bytes:
        """The file with the change."""
        return text[: self.change.begin] + self.change.new.encode() + text[self.change.end :]


def choose(root: Path, paths: Iterable[Path], count: int, seed: int) -> list[Mutant]:
    """As many mutants of these files. A change of other lines leaves the choice as it is, but for the lines' own."""
    by_name = {mutant.name: mutant for path in paths for mutant in mutants(root, path)}
    ranked = sorted(by_name, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
    return [by_name[name] for name in ranked[:count]]


def mutants(root: Path, path: Path) -> Iterator[Mutant]:
    """All of a file."""
    text = path.read_bytes()
    begins = [0, *(found.end() for found in re.finditer(rb"\n", text))]
    for change in (of_python if path.suffix == ".py" else of_device)(text.decode()):
        first, last = (bisect.bisect(begins, place) - 1 for place in (change.begin, max(change.begin, change.end - 1)))
        lines = text[begins[first] :].splitlines()[: last - first + 1]
        inside = change.begin - begins[first], change.end - begins[first]
        whole = b"\n".join(lines)
        new = (whole[: inside[0]] + change.new.encode() + whole[inside[1] :]).decode()
        new = DROPPED if new.strip() == ";" else _flat(new)
        yield Mutant(str(path.relative_to(root)), change, first + 1, _flat(whole.decode()), new)


def _flat(text: str) -> str:
    return " ".join(text.split())


# -- Python


def of_python(text: str) -> Iterator[Change]:
    code = Code(text)
    for node in code.read(ast.parse(text)):
        match node:
            case ast.Compare(left=left, ops=[_], comparators=[right]) | ast.BinOp(left=left, right=right):
                yield from code.operator(left, right)
            case ast.BoolOp(values=[left, right, *_]):
                yield from code.operator(left, right)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield code.change(node, f"({code.text_of(operand)})")
            case ast.Constant(value=bool(value)):
                yield code.change(node, str(not value))
            case ast.Constant(value=int(value)):
                yield code.change(node, str(value + 1))
            case ast.Constant(value=float(value)):
                yield code.change(node, str(value * 2 or 1.0))
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                yield code.change(test, f"(not ({code.text_of(test)}))")
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Continue():
                yield code.change(node, "pass")
            case ast.Call(args=[first, second, *_]) if not isinstance(first, ast.Starred):
                if not isinstance(second, ast.Starred) and code.text_of(first) != code.text_of(second):
                    texts = code.text_of(second), code.text_between(first, second), code.text_of(first)
                    yield Change(code.place(first)[0], code.place(second)[1], "".join(texts))


class Code:
    """Of a file: where its nodes stand."""

    def __init__(self, text: str) -> None:
        self.text = text.encode()
        self._lines = [0, *(found.end() for found in re.finditer(rb"\n", self.text))]

    def read(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes that do something: no types, imports, or f-strings, whose places Python 3.11 does not know."""
        if isinstance(node, (ast.JoinedStr, ast.ImportFrom, ast.Import)):
            return
        yield node
        types = {"annotation", "returns", "decorator_list"}
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and name not in types:
                    yield from self.read(child)

    def place(self, node: ast.AST) -> tuple[int, int]:
        ends = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        begin, end = (self._lines[line - 1] + column for line, column in ends)
        return begin, end

    def text_of(self, node: ast.AST) -> str:
        begin, end = self.place(node)
        return self.text[begin:end].decode()

    def text_between(self, left: ast.AST, right: ast.AST) -> str:
        return self.text[self.place(left)[1] : self.place(right)[0]].decode()

    def change(self, node: ast.AST, new: str) -> Change:
        return Change(*self.place(node), new)

    def operator(self, left: ast.AST, right: ast.AST) -> Iterator[Change]:
        """The change of what stands between two operands."""
        between, begin = self.text_between(left, right), self.place(left)[1]
        found = re.search(r"not in|is not|<<|>>|//|\*\*|[<>=!]=|[-+*/%&|<>]|\b(?:in|is|and|or)\b", between)
        if found and (new := OF_PYTHON.get(found[0])):
            yield Change(begin + found.start(), begin + found.end(), new)


# -- device code


def of_device(text: str) -> Iterator[Change]:
    read = _UNREAD.sub(lambda found: re.sub(r"[^\n]", "\0", found[0]), text)
    for expression, new in (
        (_OPERATOR, OF_DEVICE.__getitem__),
        (_NUMBER, lambda number: str(int(number) + 1)),
        (_CLAMP, lambda name: name.replace("min", "MAX").replace("max", "min").lower()),
        (_ORDER, lambda _: ";"),
    ):
        for found in expression.finditer(read):
            before = len(text[: found.start()].encode())
            yield Change(before, before + len(found[0].encode()), new(found[0]))
