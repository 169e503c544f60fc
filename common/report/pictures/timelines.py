"""Pictures of timelines: who did what when on an SM, drawn from the time stamps that a kernel took on a GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from textwrap import wrap

from flashladder.common.report.pictures.svg import BAD, COLOURS, DARK, INK, MUTED, PAPER, Svg
from flashladder.common.runtime.device import TENSOR_FLOPS
from flashladder.common.studies.timeline import phases, stamps
from flashladder.common.studies.timeline.events import QUEUE, Lane, Timeline
from flashladder.common.studies.timeline.phases import Span

LEFT, WIDTH, GAP = 126, 820, 5  # pixels: where time begins, its extent, and what is between rows
HEIGHT, STRIP = 20, 14  # of a row, and of each strip where it has several
SIZE, LETTERS = 12, 142  # of text, and how many letters fit into a line
SHOWN_BLOCKS = 4  # of a tile, in a panel
WARPGROUP_ROWS = 64  # of a product
EXPONENTIALS = 16  # of an SM in a cycle: CUDA C++ Programming Guide, "Arithmetic Instructions"
_EMPTY, _WAIT, _PRODUCT_WAIT, _BEGIN = "#f6f7f9", "#e3e6eb", "#cfd4dc", "#e6d5b8"
_ON_COLOUR = "#14181c"  # words on a bar, which keeps its colour on a dark page
_DARK = DARK | {_EMPTY: "#1d232b", _WAIT: "#343c47", _PRODUCT_WAIT: "#48525f", BAD: "#ff8a7a"}
_COLOURS = {
    stamps.QK: COLOURS[0],
    stamps.PV: COLOURS[2],
    "copy of Q, K or V": COLOURS[1],
    phases.SOFTMAX: COLOURS[3],
    phases.RESCALE: COLOURS[4],
    phases.EPILOGUE: COLOURS[5],
    phases.STARTS: COLOURS[6],
    phases.COPIES: COLOURS[1],
    phases.BEGIN: _BEGIN,
    phases.DRAWS: _BEGIN,
    phases.FOR_PRODUCTS: _PRODUCT_WAIT,
}
_LEGEND = {
    **{name: _COLOURS[name] for name in (stamps.QK, stamps.PV, "copy of Q, K or V", phases.SOFTMAX, phases.RESCALE)},
    **{name: _COLOURS[name] for name in (phases.STARTS, phases.EPILOGUE, phases.BEGIN, phases.FOR_PRODUCTS)},
    "other waits": _WAIT,
}


@dataclass(frozen=True)
class PictureRow:
    """A line of the picture: strips of spans, one below the other."""

    name: str
    strips: tuple[tuple[Span, ...], ...]


def draw(timeline: Timeline) -> str:
    """The picture: four blocks amid a tile, what lies between two tiles, and the mean cycles of each phase."""
    facts, lanes = timeline.facts, timeline.lanes
    svg = Svg(f"Who did what when in {facts['version']}", _DARK)
    svg.heading(16, 28, f"{facts['version']}: who did what when, by time stamps taken on {facts['device']}")
    y = 46.0
    for line in _circumstances(timeline):
        svg.text(16, y, line, SIZE, MUTED)
        y += 16
    for line in wrap(f"made worse by the stamps: {facts['flaw']}" if facts.get("flaw") else "", LETTERS):
        svg.text(16, y, line, SIZE, BAD)
        y += 16
    y = _legend(svg, y)
    table = rows(lanes)
    for title, begin, end in _panels(lanes):
        y = _panel(svg, table, title, begin, end, y + 30)
    _means(svg, timeline, y + 30)
    return str(svg)


def _circumstances(timeline: Timeline) -> Iterator[str]:
    facts = timeline.facts
    plain, with_stamps = float(facts["us_without_stamps"]), float(facts["us_with_stamps"])
    yield from wrap(f"{facts['problem'].replace(',', ', ')}; {facts['config'].replace(',', ', ')}", LETTERS)
    yield from wrap(
        f"{facts['time']}, commit {facts['commit']}, driver {facts['driver']}, CUDA {facts['toolkit']}, "
        f"{facts['sm_mhz']} MHz; registers: {facts['registers']}",
        LETTERS,
    )
    yield (
        f"With stamps the kernel takes {with_stamps:,.1f} us instead of {plain:,.1f}: {with_stamps / plain - 1:+.1%}. "
        "SM 0 alone stores them; one thread a warpgroup does."
    )


def _legend(svg: Svg, y: float) -> float:
    names = [*_LEGEND]
    for part in (names[: len(names) // 2], names[len(names) // 2 :]):
        svg.legend(y, {name: _LEGEND[name] for name in part}, gap=40)
        y += 18
    about = (
        "Products are in flight from when the first is started until the warpgroup has waited for them, a copy until a "
        "warpgroup has seen its end. Both may have ended before. The MUFU computes exponentials: each warpgroup's lie "
        "somewhere in its softmax."
    )
    for line in wrap(about, LETTERS):
        svg.text(16, y + 12, line, SIZE, MUTED)
        y += 16
    return y


def rows(lanes: Sequence[Lane]) -> list[PictureRow]:
    """TMA, the producer, the tensor cores, the MUFU and each consumer, of each CTA that is on the SM at a time."""
    places: dict[int, list[list[Lane]]] = defaultdict(list)
    for place, own in phases.residents(lanes):
        places[place].append(own)
    made = []
    for place, ctas in sorted(places.items()):
        prefix = f"{'ABCDEFGH'[place % 8]}: " if len(places) > 1 else ""
        by_group: dict[int, list[Lane]] = defaultdict(list)
        for lane in (lane for cta in ctas for lane in cta):
            by_group[lane.warpgroup].append(lane)
        consumers = {n: own for n, own in sorted(by_group.items()) if any(lane.consumes for lane in own)}
        done = {group: _joined(own, phases.phases) for group, own in by_group.items()}
        if brought := tuple(span for cta in ctas for span in phases.copies(cta)):
            made.append(PictureRow(f"{prefix}TMA", tuple(_only(brought, name) for name in ("Q", "K", "V"))))
        made += [PictureRow(f"{prefix}producer", (done[group],)) for group in by_group if group not in consumers]
        mufu = (tuple(span for span in done[group] if span.phase == phases.SOFTMAX) for group in consumers)
        made.append(PictureRow(f"{prefix}MUFU", tuple(mufu)))
        for group, own in consumers.items():
            started = _joined(own, phases.products)
            strips = tuple(_only(started, kind) for kind in (stamps.QK, stamps.PV))
            made.append(PictureRow(f"{prefix}products of {group}", strips))
            made.append(PictureRow(f"{prefix}consumer {group}", (done[group],)))
    return made


def _joined(lanes: Sequence[Lane], spans_of: Callable[[Lane], list[Span]]) -> tuple[Span, ...]:
    return tuple(span for lane in lanes for span in spans_of(lane))


def _only(spans: Sequence[Span], what: str) -> tuple[Span, ...]:
    return tuple(span for span in spans if span.what == what)


def _panels(lanes: Sequence[Lane]) -> Iterator[tuple[str, int, int]]:
    """What is shown: titles, first and last cycles; all of the same length."""
    lane = next(lane for lane in lanes if lane.consumes)
    tiles = [tile for tile in _tiles(lane) if len(tile) > SHOWN_BLOCKS] or [max(_tiles(lane), key=len)]
    tile = tiles[len(tiles) // 2]
    first = max(0, (len(tile) - SHOWN_BLOCKS) // 2)
    last = min(first + SHOWN_BLOCKS, len(tile) - 1)
    begin, cycles = tile[first], max(tile[last] - tile[first], 1000)
    yield f"Amid a tile: {last - first} blocks" if last > first else "A tile of one block", begin, begin + cycles
    own = [each for each in lanes if each.consumes and each.warpgroup == lane.warpgroup]
    over = [span for each in own for span in phases.phases(each) if span.phase == phases.EPILOGUE]
    if over:
        amid = over[len(over) // 2 if len(over) > 2 else 0]
        yield "The end of a tile", amid.begin - cycles // 3, amid.begin - cycles // 3 + cycles
    yield "The beginning", 0, cycles


def _tiles(lane: Lane) -> list[list[int]]:
    """When a warpgroup started each product Q K^T, tile by tile."""
    tiles: list[list[int]] = [[]]
    for before, event in pairwise(lane.events):
        if event.kind == stamps.ARRIVED and event.what in (QUEUE, "Q"):
            tiles.append([])
        elif event.kind == stamps.ISSUED and stamps.QK in event.what:
            tiles[-1].append(before.cycle)
    return [tile for tile in tiles if tile]


def _panel(svg: Svg, table: Sequence[PictureRow], title: str, begin: int, end: int, y: float) -> float:
    svg.text(16, y, f"{title}: {end - begin:,} cycles, from cycle {begin:,} on", 13, bold=True)
    y += 8
    scale = WIDTH / (end - begin)
    for row in table:
        height = max(HEIGHT, STRIP * len(row.strips))
        thick = height / len(row.strips)
        svg.text(16, y + height / 2 + 4, row.name, SIZE, MUTED)
        svg.rect(LEFT, y, WIDTH, height, _EMPTY, "none")
        for number, strip in enumerate(row.strips):
            for span in strip:
                if span.end > begin and span.begin < end:
                    left, right = (LEFT + scale * (min(max(t, begin), end) - begin) for t in (span.begin, span.end))
                    _bar(svg, span, left, max(right - left, 0.6), y + number * thick, thick)
        y += height + GAP
    step = _round_step((end - begin) / 8)
    for tick in range(0, end - begin, step):
        svg.text(LEFT + scale * tick, y + 8, f"{tick:,}", 11, MUTED)
    return y + 12


def _bar(svg: Svg, span: Span, x: float, width: float, y: float, height: float) -> None:
    """A span, with its name where that fits."""
    copies = span.phase in ("Q", "K", "V")
    colour = COLOURS[1] if copies else _COLOURS.get(span.phase, _WAIT)
    svg.rect(round(x, 2), round(y, 2), round(width, 2), round(height, 2), colour, PAPER, 0.5)
    words = span.what if span.phase in (*phases.WAITS, "Q", "K", "V", phases.STARTS) else span.phase
    ink = INK if colour in (_WAIT, _PRODUCT_WAIT) else _ON_COLOUR
    if width > SIZE * 0.62 * len(words):
        svg.text(round(x + width / 2, 2), round(y + height / 2 + SIZE * 0.36, 2), words, SIZE, ink, "middle")


def _round_step(cycles: float) -> int:
    """A round number near to it: 1, 2 or 5 times a power of ten."""
    power = 10 ** max(0, len(str(int(cycles))) - 1)
    return next((n * power for n in (1, 2, 5) if n * power >= cycles), 10 * power)


def _means(svg: Svg, timeline: Timeline, y: float) -> None:
    """The table of mean cycles a block."""
    by_group: dict[str, list[Lane]] = defaultdict(list)
    for lane in timeline.lanes:
        by_group[f"{'consumer' if lane.consumes else 'producer'} {lane.warpgroup}"].append(lane)
    found = {name: phases.means(own) for name, own in sorted(by_group.items())}
    counts = ", ".join(f"{sum(map(phases.blocks, by_group[name])):,} of {name}" for name in found)
    svg.text(16, y, "Mean cycles a block of keys", 13, bold=True)
    y += 16
    svg.text(16, y, f"over all blocks that were recorded: {counts}", SIZE, MUTED)
    columns = {name: 260 + 100 * place for place, name in enumerate(found)}
    y += 20
    for name, x in columns.items():
        svg.text(x, y, name, SIZE, MUTED, anchor="end")
    for phase in dict.fromkeys((*phases.PHASES, *(phase for each in found.values() for phase in each))):
        if any(phase in each for each in found.values()):
            y += 16
            svg.text(16, y, phase, SIZE)
            for name, x in columns.items():
                svg.text(x, y, f"{found[name][phase]:,.0f}" if phase in found[name] else "", SIZE, anchor="end")
    y += 18
    svg.text(16, y, "all", SIZE, bold=True)
    for name, x in columns.items():
        svg.text(x, y, f"{sum(found[name].values()):,.0f}", SIZE, anchor="end", bold=True)
    for line in _bounds(timeline, found):
        y += 16
        svg.text(16, y + 4, line, SIZE, MUTED)


def _bounds(timeline: Timeline, found: dict[str, dict[str, float]]) -> Iterator[str]:
    """What the machine needs at least for a block of each consumer that is on the SM at a time."""
    scores = WARPGROUP_ROWS * int(timeline.facts["block_n"])
    tensor = 4 * scores * int(timeline.facts["head_dim"]) / TENSOR_FLOPS[90]
    mufu = scores / EXPONENTIALS
    taken = [sum(means.values()) for name, means in found.items() if name.startswith("consumer")]
    consumers = sum(row.name.split(": ")[-1].startswith("consumer") for row in rows(timeline.lanes))
    mean = sum(taken) / len(taken)
    yield (
        f"A block of one consumer needs {tensor:,.0f} cycles of the tensor cores and {mufu:,.0f} of the MUFU at least, "
        f"and took {mean:,.0f}; {consumers} share an SM. So these were busy, on the whole:"
    )
    busy = {"the tensor cores": tensor, "the MUFU": mufu}
    yield " and ".join(f"{name} {consumers * cycles / mean:.0%}" for name, cycles in busy.items()) + " of the time."
