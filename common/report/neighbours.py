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

LIMIT = 40  # lines that a step may have
LARGER = {  # the steps that are larger: how many lines they may have, and why
    "01_base": (600, "It goes from ordinary cores to tensor cores, and all headers begin with it."),
    "08_fewer_address_ops": (52, "Its copier and its reader keep their addresses, and stand beside those that do not."),
    "17_lazy_rescale": (86, "A softmax that rescales seldom needs a second sum, of P as rounded."),
    "18_anchored_softmax": (134, "A softmax without maxima must find out when it has lost a row, and begin again."),
    "20_woven_copies": (126, "Copies between products need rings of fragments and a copier that stops and goes on."),
    "23_general": (
        230,
        "Masks, any lengths, any strides and a schedule come in one step, with copiers for any columns.",
    ),
    "24_woven_general": (
        630,
        "The general loop is woven, in parts where a mask cuts, and takes what models ask for: "
        "packed sequences, sliding windows, softcaps, ALiBi, sinks, dropout, any head_dims.",
    ),
    "26_tma": (80, "A tile that TMA brings must be mapped, asked for and waited for, with mbarriers."),
    "27_producer_warp": (95, "With roles come registers that move, and tiles that are waited for and released."),
    "31_persistent": (74, "A CTA that goes on to the next tile must not wait until the last one is stored."),
    "33_rare_rescale": (
        94,
        "Where P may be larger than 1, sums go by blocks, tell of equal keys, and keep what rounding loses.",
    ),
    "34_any_attention": (110, "Masks, any lengths, grouped heads and tiles that are drawn come in one step."),
    "36_wide_heads": (84, "Rows whose scores lie far from 0 are counted from their first maximum."),
    "37_no_maxima": (
        63,
        "A softmax with a stale m must see when m was too low, and a warp must mend that alone.",
    ),
    "39_shorter_turn": (173, "The producer says where a tile is, sums come early, and O has a store of its own."),
    "40_row_by_row": (215, "From here on the softmax is one flat type, which takes a lane's rows one after the other."),
    "43_across_tiles": (116, "From tile to tile the loop does not end, so what it is made of is named before it."),
    "45_packed_sequences": (
        96,
        "Packed sequences need an order of tiles of their own, and each tile says where it lies.",
    ),
    "46_scheduler_warp": (
        221,
        "A third role needs a queue with three ends; with time to search, it has an order of tiles of its own.",
    ),
    "47_place_of_q": (
        190,
        "Tiles stand apart from their barriers, as O takes Q's, load and attend are functions. V has its own width.",
    ),
    "decode/01_packed_heads": (630, "It goes from ordinary cores to tensor cores, as rung 01 does."),
    "decode/02_split_keys": (95, "Parts of the keys need a place for what they come to, and one more kernel."),
    "decode/06_equal_parts": (70, "That CTAs find their part by themselves takes sums over the lengths, in a warp."),
    "decode/10_seen_keys": (170, "What models ask for comes in one step: padding, a window, a softcap and ALiBi."),
    "decode/12_append": (95, "A kernel of its own writes new keys, and Q and K are turned on their way."),
    "decode/13_cluster_combine": (88, "A cluster's shared memory takes the place of a workspace and a counter."),
    "mla/03_columns_by_tma": (192, "Two roles, TMA and a barrier for each 64 columns come together."),
    "mla/04_seesaw": (130, "Two groups take blocks in turn, and pass P on: the loop is another one."),
    "mla/05_equal_parts": (110, "Parts are found on the GPU, and a sliced kernel combines those of all sequences."),
    "mla/06_cluster_combine": (145, "It stands beside rung 05 on rung 04, whose splits and second kernel it has not."),
    "decode/11_fp8_cache": (160, "Operands of bytes come with a Q and a P in the range of f16, and with scales."),
    "backward/01_tensor_cores": (680, "It goes from ordinary cores to tensor cores, and all headers begin with it."),
    "backward/04_coalesced_atomics": (54, "A tile of dQ in the order of registers must be sorted when it is rounded."),
    "backward/05_fewer_instructions": (66, "The pass before the loop brings lse in log2, and reads 16 bytes a lane."),
    "backward/06_two_stages": (50, "A copier keeps its addresses, as it copies to one stage and to the other."),
    "backward/08_two_roles": (
        172,
        "With roles come pairs of warps that exchange P, and numbers of rows that travel.",
    ),
    "backward/09_causal": (66, "A mask by keys, and an order of tiles by keys, are not those of the forward pass."),
    "backward/10_general": (205, "Any lengths, any strides, grouped heads and padded passes come in one step."),
    "backward/11_any_attention": (
        585,
        "It brings what several rungs of the forward ladder bring, and rung 12's dropout, counts rows anew where they "
        "are packed, and can add in one order.",
    ),
    "backward/14_producer_warp": (
        170,
        "Two roles, TMA and a ring of tiles come together, as in the forward ladder's 27.",
    ),
    "backward/15_bulk_reduction": (75, "Sums of dQ lie in another order, which all three kernels know."),
    "backward/16_scores_ahead": (50, "The loop's order is another one, and its first step has no step before it."),
    "backward/17_scores_under_gradients": (
        80,
        "The loop begins at another product, so its parts are named before it; K and V are operands of two kinds.",
    ),
    "backward/18_dependent_launches": (95, "With dropout dV comes behind dS, and a lane's mask is drawn and kept."),
    "backward/19_fixed_order": (
        100,
        "Warps of their own add, each warp of the producer's has a role, and tiles come in another order.",
    ),
    "48_column_of_ones": (
        414,
        "A softmax whose m lags is another one, whose rare path touches single rows alone; and it takes dropout.",
    ),
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
        return LARGER[self.upper.name][0] if self.upper.name in LARGER else LIMIT

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
