"""How far a rung's code is from that of the rung below, in lines: of its kernel, and of the headers that it brings.

Comments, blank lines and indentation do not count. Headers are counted in two ways. `whole`: each header that the rung
below does not include, all of it. `used`: each definition of a header (a struct, a function, a constant) that the
kernel uses and the one below does not, whatever header it is in. A definition is used if its name stands in the kernel
or in another definition that is used. Names are compared as words, and definitions of one name are taken together.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich.table import Table
from rich.text import Text

from flashladder.common.build.sources import Sources
from flashladder.common.catalog import Version
from flashladder.common.console import table

LIMIT = 40  # lines that a step may have
LARGER = {  # the steps that are larger: how many lines they may have, and why
    "01_base": (596, "It goes from ordinary cores to tensor cores, and all headers begin with it."),
    "08_fewer_address_ops": (52, "Its copier and its reader keep their addresses, and stand beside those that do not."),
    "17_lazy_rescale": (91, "A softmax that rescales seldom needs a second sum, of P as rounded."),
    "18_anchored_softmax": (151, "A softmax without maxima must find out when it has lost a row, and begin again."),
    "20_woven_copies": (126, "Copies between products need rings of fragments and a copier that stops and goes on."),
    "23_general": (287, "Masks, any lengths, any strides and a schedule come in one step."),
    "24_woven_general": (
        408,
        "It weaves what rungs 20 to 22 weave, on top of the general kernel, and takes what models ask for: "
        "packed sequences, sliding windows, softcaps, ALiBi.",
    ),
    "26_tma": (156, "A launch that declares tensor maps has a header of its own, and mbarriers come with TMA."),
    "27_producer_warp": (91, "With roles come registers that move, and tiles that are waited for and released."),
    "30_softmax_under_products": (
        46,
        "Its softmax meets O later than the scores, and stands beside the one that does not.",
    ),
    "31_persistent": (71, "A CTA that goes on to the next tile must not wait until the last one is stored."),
    "32_q_in_registers": (72, "Its fragments of Q are those of the Ampere rungs, which no rung from 25 on had used."),
    "33_rare_rescale": (
        108,
        "Where P may be larger than 1, sums go by blocks, tell of equal keys, and keep what rounding loses.",
    ),
    "34_any_attention": (172, "Masks, any lengths, grouped heads and tiles that are drawn come in one step."),
    "37_no_maxima": (124, "A softmax that trusts m must see when it was wrong, and a warp must mend that alone."),
}

_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_STRING = re.compile(r'"(?:\\.|[^"\\\n])*"')
_WORD = re.compile(r"[A-Za-z_]\w*")
_TEMPLATE = re.compile(r"^template\s*<(?:[^<>]|<[^<>]*>)*>\s*")
_NAMES = (  # of a definition without its template's parameters, tried in turn
    re.compile(r"^#\s*define\s+(\w+)"),
    re.compile(r"^(?:struct|class|union|enum)\b[^{;:<]*?(\w+)\s*[<{;:]"),
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
class Step:
    """From one rung to the next."""

    lower: Version
    upper: Version
    added: int  # lines of the kernel
    removed: int
    headers: dict[str, int]  # newly included, with their lines
    definitions: tuple[Definition, ...]  # newly used

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
        if self.lower.instruction_set != self.upper.instruction_set:
            return None
        return LARGER[self.upper.name][0] if self.upper.name in LARGER else LIMIT

    @property
    def is_too_large(self) -> bool:
        """Whether it is beyond its limit."""
        return self.limit is not None and max(self.whole, self.used) > self.limit


def steps(versions: Iterable[Version]) -> list[Step]:
    """The steps that lead to these rungs, from their parents or the rungs below; the lowest of a ladder has none."""
    found = []
    for version in versions:
        ladder = version.its_ladder()
        place = ladder.index(version)
        if lower := version.below() if version.parent else ladder[place - 1] if place else None:
            found.append(step(lower, version))
    return found


def step(lower: Version, upper: Version) -> Step:
    """What a rung adds to the one below. Where they share a kernel, nothing."""
    before, after = code(lower.kernel), code(upper.kernel)
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    same = sum(block.size for block in matcher.get_matching_blocks())
    known, used = headers(lower), set(used_definitions(lower))
    return Step(
        lower,
        upper,
        added=len(after) - same,
        removed=len(before) - same,
        headers={path.name: len(code(path)) for path in headers(upper) if path not in known},
        definitions=tuple(each for each in used_definitions(upper) if each not in used),
    )


def overview(found: Sequence[Step]) -> Table:
    """A line for each step."""
    figures = ("added", "removed", "whole", "used")
    made = table("Steps in lines of code", "rung", "technique", *figures, "headers", right=figures, wrap=("headers",))
    for each in found:
        sizes = (Text(str(size), "red" if each.is_too_large else "") for size in (each.whole, each.used))
        brought = ", ".join(f"{name} {lines}" for name, lines in each.headers.items())
        made.add_row(each.upper.address, each.upper.title, str(each.added), str(each.removed), *sizes, brought)
    return made


def details(each: Step) -> Table:
    """The definitions that a step newly uses."""
    made = table(f"{each.upper.name} newly uses", "definition", "header", "lines", right=("lines",))
    for definition in each.definitions:
        made.add_row(definition.name, definition.header, str(len(definition.lines)))
    return made


def row(each: Step) -> dict[str, str | int]:
    """A step as a row of a CSV file."""
    return {
        "rung": each.upper.name,
        "below": each.lower.name,
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


def headers(version: Version) -> tuple[Path, ...]:
    """The headers that its kernel includes, directly or not."""
    kernel = version.kernel.resolve()
    return tuple(path for path in Sources().closure(kernel) if path != kernel)


@cache
def definitions(header: Path) -> tuple[Definition, ...]:
    """What a header defines, from top to bottom; its includes, pragmas and the ends of macros are left out."""
    return tuple(Definition(header.name, _name("\n".join(lines)), lines) for lines in _chunks(code(header)))


def used_definitions(version: Version) -> list[Definition]:
    """The definitions of headers that a rung's kernel uses, by header."""
    every = [each for header in headers(version) for each in definitions(header)]
    by_name: dict[str, list[Definition]] = {}
    for each in every:
        by_name.setdefault(each.name, []).append(each)
    waiting, used = _words(code(version.kernel)), set()
    while waiting:
        for each in by_name.pop(waiting.pop(), []):
            used.add(each)
            waiting |= _words(each.lines)
    return [each for each in every if each in used]


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
