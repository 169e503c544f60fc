"""Terms of a mask that depend on the key alone, or on the row alone, and cost more than passing them on.

A kernel evaluates each once for a key, or for a row, and not for each score. It has two texts for that: of the terms,
and of the mask that takes them.
"""

from __future__ import annotations

from collections.abc import Iterator

from flashladder.common.expression import text
from flashladder.common.expression.tree import SCORE, Binary, Choice, Element, Node, Type, names, walk
from flashladder.common.expression.typed import LOGIC


def terms(tree: Node, of: str) -> tuple[Node, ...]:
    """The largest that name of q and k only `of`, which is one of them; each once.

    A term is evaluated for every key or row that some score has, so elements stay where a condition decides whether
    they are read.
    """
    others = {"q", "k", SCORE} - {of}

    def found(node: Node, is_sure: bool) -> Iterator[Node]:
        named = names(node)
        if of not in named:
            return
        if not named & others and _is_costly(node) and (is_sure or not _reads(node)):
            yield node
            return
        is_decided = isinstance(node, Choice) or (isinstance(node, Binary) and node.operator in LOGIC)
        for number, part in enumerate(node.parts):
            yield from found(part, is_sure and not (is_decided and number))

    return tuple(dict.fromkeys(found(tree, True)))


def header(mask: Node | None) -> Iterator[str]:
    """C++ within the struct `Mods`: the terms, what evaluates them, and the mask that takes them."""
    held: dict[Node, str] = {}
    for what, of in (("key", "k"), ("row", "q")):
        found = terms(mask, of) if mask else ()
        yield from _struct(what, found)
        held |= {node: f"{what}.{_field(number)}" for number, node in enumerate(found)}
    yield f"static constexpr bool has_terms = {str(bool(held)).lower()};"
    yield "template <class Params>"
    body = text.c(mask, held) if mask else "true"
    yield f"__device__ static bool mask({text.GIVEN}, const OfKey &key, const OfRow &row) {{ return {body}; }}"


def _struct(what: str, found: tuple[Node, ...]) -> Iterator[str]:
    name, fields = f"Of{what.capitalize()}", [_field(number) for number in range(len(found))]
    yield f"struct {name} {{"
    yield from (f"    {text.C_TYPES[node.type]} {field};" for node, field in zip(found, fields, strict=True))
    values = ", ".join(f"from_lane({field}, lane)" for field in fields)
    yield f"    __device__ {name} from(int lane) const {{ return {{{values}}}; }}"
    yield "};"
    yield "template <class Params>"
    yield f"__device__ static {name} of_{what}({text.GIVEN}) {{ return {{{', '.join(map(text.c, found))}}}; }}"


def _field(number: int) -> str:
    return f"x{number}"


def _is_costly(node: Node) -> bool:
    """Whether it has an element, a division or fp32: conversions of positions to that are slow, too."""
    return any(
        isinstance(part, Element)
        or part.type == Type.FLOAT
        or (isinstance(part, Binary) and part.operator in ("/", "%"))
        for part in walk(node)
    )


def _reads(node: Node) -> bool:
    return any(isinstance(part, Element) for part in walk(node))
