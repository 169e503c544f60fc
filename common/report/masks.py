"""The blocks of keys that a mask costs, for a person: tables and a map in the terminal, and a picture."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from flashladder.common.api.mask_blocks import EMPTY, PARTIAL, TITLES, WHOLE, BlockList, MaskBlocks
from flashladder.common.expression import Mods
from flashladder.common.report.pictures.svg import COLOURS, DARK, LINE, MUTED, PAPER, Svg
from flashladder.common.report.tables import numbers, table

MOST_COLUMNS = 96  # of a map in the terminal: more blocks would not stand in a line
_MARKS = {EMPTY: "·", PARTIAL: "▒", WHOLE: "█"}
_FILLS = {PARTIAL: COLOURS[1], WHOLE: COLOURS[0]}
_WIDTH, _TILE = 512, 12  # pixels: of a map, but for those of many blocks; of a tile's line
_LEFT, _TOP = 76, 56


def terminal(found: MaskBlocks) -> Iterator[RenderableType]:
    """How many blocks are whole, partial and empty, and where."""
    yield _counts(found)
    for each in found.lists:
        if each.classes.shape[1] <= MOST_COLUMNS:
            yield _map(found, each)


def _counts(found: MaskBlocks) -> Table:
    kinds = (WHOLE, PARTIAL, EMPTY)
    rows = []
    for each in found.lists:
        size = each.classes.size
        computed = size - each.count(EMPTY)
        rows.append((each.title or "all", *(f"{each.count(kind):,}" for kind in kinds), f"{computed / size:.1%}"))
    title = f"Blocks of {found.block_n} keys, in tiles of {found.block_m} rows: {_mask(found)}"
    columns = ["list of", *numbers(*(TITLES[kind] for kind in kinds), "computed")]
    return table(title, columns, rows, "In partial blocks the mask is evaluated for each element.")


def _map(found: MaskBlocks, each: BlockList) -> Text:
    """A line for each tile of rows, and a letter for each block of keys."""
    spans = [_span(found, tile) for tile in range(len(each.classes))]
    width = max(map(len, spans))
    maps = ["".join(_MARKS[kind] for kind in kinds) for kinds in each.classes.tolist()]
    lines = [f"{span:>{width}}  {marks}" for span, marks in zip(spans, maps, strict=True)]
    key = ", ".join(f"{mark} {TITLES[kind]}" for kind, mark in _MARKS.items())
    return Text("\n".join([f"{each.title or 'rows'}: {key}", *lines, ""]))


def _span(found: MaskBlocks, tile: int) -> str:
    rows = found.rows(tile)
    return f"{rows.start} to {rows[-1]}"


def _mask(found: MaskBlocks) -> str:
    return Mods.parse(found.problem.mods).sources["mask"]


def draw(found: MaskBlocks) -> str:
    """Rows downwards and keys to the right, as SVG; of each list a map."""
    svg = Svg(f"Blocks of keys of {_mask(found)}", DARK)
    svg.heading(16, 24, _mask(found))
    svg.legend(34, {TITLES[kind]: _FILLS[kind] for kind in (WHOLE, PARTIAL)})
    y: float = _TOP
    for each in found.lists:
        y = _draw_list(svg, y, found, each)
    return str(svg)


def _draw_list(svg: Svg, top: float, found: MaskBlocks, each: BlockList) -> float:
    """Gives where the next one begins."""
    tiles, blocks = each.classes.shape
    cell = max(_WIDTH // blocks, 2)
    svg.text(_LEFT, top + 8, f"{each.title + ': ' if each.title else ''}{found.problem.seqlen_k:,} keys", 11, MUTED)
    top += 14
    svg.rect(_LEFT, top, blocks * cell, tiles * _TILE, PAPER, LINE)
    for tile in range(tiles):
        svg.text(_LEFT - 6, top + tile * _TILE + 9, _span(found, tile), 8, MUTED, "end")
    for kind, fill in _FILLS.items():
        runs = [
            (_LEFT + begin * cell, top + tile * _TILE, length * cell)
            for tile, kinds in enumerate(each.classes.tolist())
            for begin, length in _runs(kinds, kind)
        ]
        if runs:
            svg.bars(runs, _TILE, fill)
    return top + tiles * _TILE + 16


def _runs(kinds: list[int], wanted: int) -> Iterator[tuple[int, int]]:
    """Where blocks of a kind lie side by side: the first one, and how many."""
    at = 0
    for kind, run in groupby(kinds):
        length = len(list(run))
        if kind == wanted:
            yield at, length
        at += length
