"""Pictures of roles: who does what when in the rungs of a producer and consumers. Sketches, with assumed durations.

Each role is a process that goes through the steps of its kernel. It is busy, it starts a copy or a product, it tells
that something has happened, or it waits for that. Copies follow each other, and so do products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flashladder.common.errors import unknown
from flashladder.common.report.pictures.svg import COLOURS, MUTED, Svg

PRODUCT, SOFTMAX, COPY, EPILOGUE, BEGIN = 3, 8, 2, 5, 3  # units of time
STAGES = 2  # tiles of K, and of V
UNIT, HEIGHT = 8, 18  # pixels of a unit, and of a row
_COPIES, _CORES = "TMA", "tensor cores"
_KINDS = {
    "copy of Q, K or V": COLOURS[1],
    "Q K^T": COLOURS[0],
    "P V": COLOURS[2],
    "softmax": COLOURS[3],
    "epilogue": COLOURS[5],
}


@dataclass(frozen=True)
class Way:
    """How a rung goes through its blocks and tiles."""

    title: str
    is_overlapped: bool  # softmax under P V of the block before
    is_persistent: bool = False
    blocks: int = 4  # of each tile
    tiles: int = 1
    consumers: int = 2


@dataclass(frozen=True)
class Bar:
    """What a row does from one time to another."""

    row: str
    begin: int
    end: int
    kind: str
    words: str = ""


@dataclass(frozen=True)
class Act:
    """A step of a role: when all `events` have happened it takes `length`, and then `event` has happened. With a `row`
    that has a pace of its own, the role only starts it, and goes on."""

    kind: str = ""
    length: int = 0
    row: str = ""
    event: str = ""
    words: str = ""
    events: tuple[str, ...] = ()


Acts = Iterator[Act]

WAYS = {
    "in_turn": Way("one product after the other, the softmax between them", is_overlapped=False),
    "overlapped": Way("P V of the block before runs under the softmax", is_overlapped=True),
    "cta_a_tile": Way("a CTA a tile", is_overlapped=True, blocks=2, tiles=2),
    "persistent": Way("the same CTA goes on", is_overlapped=True, is_persistent=True, blocks=2, tiles=2),
}


def sketch(names: Mapping[str, str]) -> str:
    """Ways of rungs, one below the other, by the rungs' numbers. ConfigError where there is no such way."""
    if missing := next((name for name in names.values() if name not in WAYS), None):
        raise unknown("way of roles", missing, WAYS)
    svg = Svg("Who does what when")
    svg.heading(16, 28, "Who does what when: a sketch, nothing in it is measured")
    units = f"a product {PRODUCT}, a softmax {SOFTMAX}, a copy {COPY}, an epilogue {EPILOGUE}, a CTA's begin {BEGIN}"
    svg.text(16, 46, f"assumed units of time: {units}; the number is the consumer", 11, MUTED)
    svg.legend(58, _KINDS)
    y = 96.0
    for number, name in names.items():
        svg.text(16, y, f"{number}: {WAYS[name].title}", 12, bold=True)
        y = _draw(svg, WAYS[name], y)
    return str(svg)


def _draw(svg: Svg, way: Way, y: float) -> float:
    bars = timeline(way)
    for row in (_COPIES, _CORES, *map(_name, range(way.consumers))):
        svg.text(16, y + 21, row, 11, MUTED)
        svg.rect(104, y + 8, max(bar.end for bar in bars) * UNIT, HEIGHT, "#f3f4f6", "none")
        for bar in bars:
            if bar.row == row:
                left, width = 104 + bar.begin * UNIT, (bar.end - bar.begin) * UNIT
                svg.rect(left, y + 8, width, HEIGHT, _KINDS[bar.kind])
                svg.text(left + width / 2, y + 21, bar.words, 10, anchor="middle")
        y += HEIGHT + 4
    return y + 34


def timeline(way: Way) -> list[Bar]:
    """What each row does, in the order of time; the earliest role that can go on does so first."""
    roles = {"producer": _producer(way), **{_name(c): _consumer(way, c) for c in range(way.consumers)}}
    waiting: dict[str, Act] = {name: next(steps) for name, steps in roles.items()}
    clock = dict.fromkeys([*roles, _COPIES, _CORES], 0)
    happened: dict[str, int] = {}
    bars: list[Bar] = []
    while waiting:
        ready = [name for name, act in waiting.items() if all(event in happened for event in act.events)]
        starts = {name: max([clock[name], *(happened[event] for event in waiting[name].events)]) for name in ready}
        name = min(ready, key=lambda each: starts[each])
        act, begin = waiting[name], starts[name]
        clock[name] = begin
        row = act.row or name
        begin = max(begin, clock[row])
        if act.kind:
            clock[row] = begin + act.length
            bars.append(Bar(row, begin, clock[row], act.kind, act.words))
        elif act.length:
            clock[name] += act.length
        if act.event:
            happened[act.event] = clock[row]
        if following := next(roles[name], None):
            waiting[name] = following
        else:
            del waiting[name]
    return bars


def _name(consumer: int) -> str:
    return f"consumer {consumer}"


def _until(*events: str) -> Act:
    return Act(events=events)


def _producer(way: Way) -> Acts:
    """Fills Q, and the rings of K and V, as far as they are empty; block by block, with K one block ahead."""
    filled = {"q": 0, "k": 0, "v": 0}

    def fill(name: str) -> Acts:
        number, stages = filled[name], 1 if name == "q" else STAGES
        if number >= stages:
            yield _until(*(f"{name}{number - stages} read by {c}" for c in range(way.consumers)))
        yield Act("copy of Q, K or V", COPY, _COPIES, f"{name}{number}", name.upper())
        filled[name] += 1

    for tile in range(way.tiles):
        if tile == 0 or not way.is_persistent:
            yield _until(*(f"tile {tile - 1} done by {c}" for c in range(way.consumers) if tile))
            yield Act(length=BEGIN)
        yield from fill("q")
        yield from fill("k")
        for block in range(way.blocks):
            if block + 1 < way.blocks:
                yield from fill("k")
            yield from fill("v")


def _consumer(way: Way, c: int) -> Acts:
    """Its products and softmaxes, tile after tile."""

    def product(kind: str, tile: str) -> Acts:
        yield _until(tile)
        yield Act(kind, PRODUCT, _CORES, f"{tile} used by {c}", str(c))

    def done(tile: str) -> Acts:
        yield Act(events=(f"{tile} used by {c}",), event=f"{tile} read by {c}")

    for tile in range(way.tiles):
        first, end = tile * way.blocks, (tile + 1) * way.blocks
        yield _until(f"q{tile}")
        for block in range(first, end):
            yield from product("Q K^T", f"k{block}")
            if way.is_overlapped and block > first:
                yield from product("P V", f"v{block - 1}")
            yield from done(f"k{block}")
            yield Act("softmax", SOFTMAX)
            if not way.is_overlapped:
                yield from product("P V", f"v{block}")
                yield from done(f"v{block}")
            elif block > first:
                yield from done(f"v{block - 1}")
        yield Act(event=f"q{tile} read by {c}")
        if way.is_overlapped:
            yield from product("P V", f"v{end - 1}")
            yield from done(f"v{end - 1}")
        yield Act("epilogue", EPILOGUE, event=f"tile {tile} done by {c}")
