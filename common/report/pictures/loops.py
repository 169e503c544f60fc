"""Pictures of order: how loops pass over tiles, what a kernel's loop consists of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashladder.common import catalog
from flashladder.common.compiler.sass import Code, SassInstruction
from flashladder.common.compiler.sass.opcodes import PIPES
from flashladder.common.measure import references
from flashladder.common.measure.references import tiling
from flashladder.common.report.pictures.svg import CELL, COLOURS, MUTED, Svg

BLOCK = 16  # rows of a tile in the pictures of loop orders
TILES_Q, TILES_K = 6, 4


@dataclass(frozen=True)
class _Watch(tiling.AttentionMask):
    """A mask that notes which tiles of S are computed, in order."""

    visits: list[tuple[int, int]] = field(default_factory=list)

    def apply(self, scores: Tensor, rows: slice, keys: slice) -> Tensor:
        self.visits.append((rows.start // BLOCK, keys.start // BLOCK))
        return super().apply(scores, rows, keys)


@dataclass
class _Journal(tiling.Hbm):
    """Memory that notes how often each tile of a matrix is loaded and stored."""

    loads: Counter[tuple[str, int]] = field(default_factory=Counter)
    stores: Counter[tuple[str, int]] = field(default_factory=Counter)

    def load(self, name: str, tile: Tensor) -> Tensor:
        self.loads.update((name, number) for number in _numbers(tile))
        return super().load(name, tile)

    def store(self, name: str, place: Tensor, tile: Tensor) -> None:
        self.stores.update((name, number) for number in _numbers(place))
        super().store(name, place, tile)


def _numbers(tile: Tensor) -> range:
    """Which tiles of a matrix a part of it is."""
    first = tile.storage_offset() // tile.shape[-1] // BLOCK
    return range(first, first + max(1, tile.shape[0] // BLOCK))


def loop_order(name: str) -> str:
    """The order in which py_fa1 or py_fa2 computes the tiles of S, and how often each tile of the others travels."""
    svg = Svg(f"The order of {name}")
    svg.heading(16, 28, f"{name}: the order in which the tiles of S = Q K^T are computed")
    svg.text(16, 46, "beside Q and O, above K and V: how often the tile is loaded, and + stored", fill=MUTED)
    for part, causal in enumerate((False, True)):
        journal, visits = _watch(name, causal)
        left, top = 110 + part * 250, 118
        svg.text(left, top - 48, "causal" if causal else "full", 13, bold=True)
        for i in range(TILES_Q):
            for shift, matrix in ((-88, "Q"), (-46, "O")):
                svg.rect(left + shift, top + i * CELL, 40, CELL, COLOURS[0 if matrix == "Q" else 1])
                svg.text(left + shift + 20, top + i * CELL + 15, _times(journal, matrix, i), 11, anchor="middle")
        for j in range(TILES_K):
            svg.rect(left + j * 30, top - 26, 30, CELL, COLOURS[2])
            svg.text(left + j * 30 + 15, top - 11, _times(journal, "K", j), 11, anchor="middle")
            for i in range(TILES_Q):
                seen = (i, j) in visits
                svg.rect(left + j * 30, top + i * CELL, 30, CELL, "#ffffff" if seen else "#e9ebef")
                order = visits.index((i, j)) + 1 if seen else ""
                svg.text(left + j * 30 + 15, top + i * CELL + 15, order, 11, anchor="middle")
        bottom = top + TILES_Q * CELL + 16
        svg.text(left - 68, bottom, "Q", 12, MUTED, "middle")
        svg.text(left - 26, bottom, "O", 12, MUTED, "middle")
        svg.text(left + TILES_K * 15, bottom, "S", 12, MUTED, "middle")
        svg.text(left + TILES_K * 30 + 8, top - 11, "K, V", 12, MUTED)
    return str(svg)


def _watch(name: str, causal: bool) -> tuple[_Journal, list[tuple[int, int]]]:
    forward, _ = algorithm(name)
    q, k, v = (torch.zeros(rows * BLOCK, BLOCK) for rows in (TILES_Q, TILES_K, TILES_K))
    # Aligned to the top left here: a square picture of a mask is easier to read.
    mask, journal = _Watch(causal, 0), _Journal()
    forward(q, k, v, tiling.Tiling(1.0, mask, BLOCK, BLOCK), journal)
    return journal, mask.visits


def _times(journal: _Journal, name: str, tile: int) -> str:
    loads, stores = journal.loads[name, tile], journal.stores[name, tile]
    return f"{loads or ''}{f'+{stores}' if stores else ''}"


def algorithm(name: str) -> tuple[tiling.TiledForward, tiling.TiledBackward]:
    """The passes of py_fa1 or py_fa2."""
    passes: tuple[tiling.TiledForward, tiling.TiledBackward] = references.load(
        next(found for found in catalog.references() if found.name == name)
    ).algorithm
    return passes


# What the instructions of a main loop are for, by opcode or pipe; the first that fits.
_FLOAT = ("FFMA", "FMUL", "FADD", "FMNMX", "FSETP", "FSEL", "F2FP", "FMNMX3")
_BARRIERS = ("BAR", "LDGDEPBAR", "DEPBAR", "WARPSYNC", "SYNCS", "WARPGROUP")
_REST = "address, move, branch"
_ROLES = {
    "mma": (PIPES["tensor"], COLOURS[0]),
    "shared to registers": (("LDSM", "LDS"), COLOURS[2]),
    "global to shared": (("LDGSTS", "UTMALDG"), COLOURS[1]),
    "exponential": (("MUFU",), COLOURS[4]),
    "other softmax": (_FLOAT, COLOURS[3]),
    "barrier, wait": (_BARRIERS, "#3d4350"),
    _REST: ((), "#d3d7de"),
}
_PER_ROW, _WIDTH = 360, 2.4


def machine_loop(before: Code, after: Code, compiler: str) -> str:
    """The main loops of two rungs, instruction by instruction, coloured by what it is for."""
    svg = Svg(f"The main loops of {before.artifact.version} and {after.artifact.version}")
    svg.heading(16, 28, "The main loop in machine code, one stripe an instruction, in the order they are issued")
    svg.legend(42, {role: colour for role, (_, colour) in _ROLES.items()})
    y = 84.0
    for code in (before, after):
        stripes = [_role(instruction) for instruction in code.loop]
        counts = Counter(stripes)
        svg.text(16, y - 6, code.artifact.version, 12, bold=True)
        svg.text(220, y - 6, f"{len(stripes)} instructions, {counts['mma']} of them mma", 11, MUTED)
        rows = [stripes[begin : begin + _PER_ROW] for begin in range(0, len(stripes), _PER_ROW)]
        for role, (_, colour) in _ROLES.items():
            runs = [run for row, roles in enumerate(rows) for run in _runs(roles, role, y + 22 * row)]
            if runs:
                svg.bars(runs, 18, colour)
        y += 22 * len(rows) + 24
    words = f"configured as in the tables of the page, {after.artifact.arch}, ptxas {compiler}"
    svg.text(16, y - 8, words, 11, MUTED)
    return str(svg)


def _runs(roles: Sequence[str], role: str, y: float) -> list[tuple[float, float, float]]:
    """Left, top and width of each stretch of one role in a row."""
    edges = [i for i in range(len(roles) + 1) if (roles[i : i + 1] == [role]) != (i > 0 and roles[i - 1] == role)]
    return [
        (16 + begin * _WIDTH, y, (end - begin) * _WIDTH) for begin, end in zip(edges[::2], edges[1::2], strict=True)
    ]


def _role(instruction: SassInstruction) -> str:
    if instruction.is_filler:  # it is issued, and does nothing
        return _REST
    for role, (opcodes, _) in _ROLES.items():
        if instruction.base in opcodes:
            return role
    return _REST
