"""How far a rung's code is from that of the rung below, in lines: of its kernel, and of the headers that it brings.

Comments, blank lines and indentation do not count. The kernel is compared with that of the rung below. Headers are
compared with those of all lower rungs: who has climbed to a rung has read what any of these used. Lower are the rungs
that stand before it in its ladder, its parent, and what is lower than its parent.

Headers are counted in two ways. `whole`: each header that no lower rung includes, all of it. `used`: each definition
of a header (a struct, a function, a constant) that the kernel uses and no lower rung does, whatever header it is in. A
definition is used if its name stands in the kernel or in another definition that is used. Names are compared as words,
and definitions of one name are taken together.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich.table import Table

from flashladder.common.catalog import Version
from flashladder.common.compiler.sources import Sources
from flashladder.common.report.tables import folding, numbers, styled, table

LIMIT = 40  # lines that a step may have, where its version.yaml does not say another number, and why

_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_STRING = re.compile(r'"(?:\\.|[^"\\\n])*"')
_WORD = re.compile(r"[A-Za-z_]\w*")
_TEMPLATE = re.compile(r"^template\s*<(?:[^<>]|<[^<>]*>)*>\s*")
_NAMES = (  # of a definition without its template's parameters, tried in turn
    re.compile(r"^#\s*define\s+(\w+)"),
    re.compile(r"^(?:struct|class|union|enum|namespace)\b[^{;:<]*?(\w+)\s*[<{;:]"),
    re.compile(r"^using\s+(\w+)"),
    re.compile(r"^[^(=]*?(\w+)\s*(?:<[^<>()]*>|\[\w*\])?\s*="),
    re.compile(r"(\w+)\s*(?:<[^<>()]*>)?\s*\("),
)


@dataclass(frozen=True)
class Definition:
    """What a header defines at its top level."""

    header: str
    name: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class LadderStep:
    """From one rung to the next."""

    below: Version
    upper: Version
    added: int  # lines of the kernel
    removed: int
    headers: dict[str, int]  # that no lower rung includes, with their lines
    definitions: tuple[Definition, ...]  # that no lower rung uses

    @property
    def whole(self) -> int:
        """What is new, with whole headers."""
        return self.added + sum(self.headers.values())

    @property
    def used(self) -> int:
        """What is new, with the definitions that are used."""
        return self.added + sum(len(each.lines) for each in self.definitions)

    @property
    def limit(self) -> int | None:
        """How many lines it may have by either count; None from one instruction set to the next."""
        if self.below.instruction_set != self.upper.instruction_set:
            return None
        return self.upper.step.lines if self.upper.step else LIMIT

    @property
    def is_too_large(self) -> bool:
        """Whether it is beyond its limit."""
        return self.limit is not None and max(self.whole, self.used) > self.limit


def steps(versions: Iterable[Version]) -> list[LadderStep]:
    """The steps that lead to these rungs, from their parents or the rungs below; the lowest of a ladder has none."""
    found = []
    for version in versions:
        before = _before(version)
        if below := version.below() if version.parent else before[-1] if before else None:
            found.append(step(below, version, lower(version)))
    return found


def step(below: Version, upper: Version, lower: Iterable[Version] = ()) -> LadderStep:
    """What a rung adds: to the kernel of the one below, and to the headers of all that are `lower`."""
    before, after = code(below.kernel), code(upper.kernel)
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    same = sum(block.size for block in matcher.get_matching_blocks())
    climbed = [below, *lower]
    known = {path for each in climbed for path in headers(each.kernel)}
    used = {definition for each in climbed for definition in used_definitions(each.kernel)}
    return LadderStep(
        below,
        upper,
        added=len(after) - same,
        removed=len(before) - same,
        headers={path.name: len(code(path)) for path in headers(upper.kernel) if path not in known},
        definitions=tuple(each for each in used_definitions(upper.kernel) if each not in used),
    )


def lower(version: Version) -> list[Version]:
    """The rungs that are lower: those before it in its ladder, its parent, and what is lower than these."""
    found: dict[str, Version] = {}
    waiting = [version]
    while waiting:
        rung = waiting.pop()
        parent = rung.below() if rung.parent else None
        new = [each for each in (*_before(rung), parent) if each and each.name not in found]
        found |= {each.name: each for each in new}
        waiting += new
    return list(found.values())


def overview(found: Sequence[LadderStep]) -> Table:
    """A line for each step."""
    columns = ["rung", "technique", *numbers("added", "removed", "whole", "used"), *folding("headers")]
    return table("Steps in lines of code", columns, map(_cells, found))


def _cells(each: LadderStep) -> Sequence[object]:
    sizes = styled("red" if each.is_too_large else "", (each.whole, each.used))
    brought = ", ".join(f"{name} {lines}" for name, lines in each.headers.items())
    return each.upper.address, each.upper.title, each.added, each.removed, *sizes, brought


def details(each: LadderStep) -> Table:
    """The definitions that a step newly uses."""
    rows = ((definition.name, definition.header, len(definition.lines)) for definition in each.definitions)
    return table(f"{each.upper.name} newly uses", ["definition", "header", *numbers("lines")], rows)


def row(each: LadderStep) -> dict[str, str | int]:
    """A step as a row of a CSV file."""
    return {
        "rung": each.upper.name,
        "below": each.below.name,
        "title": each.upper.title,
        "added": each.added,
        "removed": each.removed,
        "whole": each.whole,
        "used": each.used,
        "headers": " ".join(each.headers),
        "definitions": " ".join(dict.fromkeys(definition.name for definition in each.definitions)),
    }


@cache
def code(path: Path) -> tuple[str, ...]:
    """The lines of a file without comments and indentation, but for those that are empty then."""
    text = _COMMENT.sub(lambda match: match[1] or "", path.read_text())
    return tuple(filter(None, map(str.strip, text.splitlines())))


@cache
def headers(kernel: Path) -> tuple[Path, ...]:
    """The headers that a kernel includes, directly or not."""
    return tuple(sorted(Sources().headers(kernel)))


@cache
def definitions(header: Path) -> tuple[Definition, ...]:
    """What a header defines, from top to bottom; its includes, pragmas and the ends of macros are left out."""
    return tuple(Definition(header.name, _name("\n".join(lines)), lines) for lines in _chunks(code(header)))


@cache
def used_definitions(kernel: Path) -> tuple[Definition, ...]:
    """The definitions of headers that a kernel uses, by header."""
    every = [each for header in headers(kernel) for each in definitions(header)]
    by_name: dict[str, list[Definition]] = {}
    for each in every:
        by_name.setdefault(each.name, []).append(each)
    waiting, used = _words(code(kernel)), set()
    while waiting:
        for each in by_name.pop(waiting.pop(), []):
            used.add(each)
            waiting |= _words(each.lines)
    return tuple(each for each in every if each in used)


def _before(version: Version) -> list[Version]:
    """The rungs that stand before it in its ladder."""
    ladder = version.its_ladder()
    return ladder[: ladder.index(version)]


def _words(lines: Iterable[str]) -> set[str]:
    return {word for line in lines for word in _WORD.findall(_STRING.sub("", line))}


def _chunks(lines: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """The definitions among the lines of a header: each ends where all brackets are closed, a macro with its line."""
    depth = 0
    chunk: list[str] = []
    for line in lines:
        if not chunk and re.match(r"#\s*(include|pragma|undef)", line):
            continue
        chunk.append(line)
        bare = _STRING.sub("", line)
        depth += sum(map(bare.count, "({[")) - sum(map(bare.count, ")}]"))
        is_macro = chunk[0].startswith("#")
        if (is_macro and not line.endswith("\\")) or (not is_macro and depth == 0 and bare.endswith((";", "}"))):
            yield tuple(chunk)
            depth, chunk = 0, []


def _name(text: str) -> str:
    bare = _TEMPLATE.sub("", text)
    found = (pattern.search(bare) for pattern in _NAMES)
    return next((match[1] for match in found if match), bare)
