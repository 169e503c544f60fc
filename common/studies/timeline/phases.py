"""From stamps to phases: what each warpgroup did between one stamp and the next, and what ran beside it.

What the machine does beside a warpgroup is known at both ends only: products are in flight from when the first is
started until the warpgroup has waited for them, a copy from its start until the first warpgroup has seen its end.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from flashladder.common.studies.timeline import stamps
from flashladder.common.studies.timeline.events import QUEUE, ROOM, Event, Lane

BEGIN, SOFTMAX, RESCALE, EPILOGUE, STARTS = "begin", "softmax", "rescale, convert", "epilogue", "starts products"
COPIES, DRAWS = "starts copies", "next tile"
FOR_TILES, FOR_PRODUCTS, FOR_ROOM = "waits for Q, K, V", "waits for products", "waits for room"
FOR_NUMBER, FOR_WARPS, FOR_STORES = "waits for a tile number", "waits for other warps", "waits for stores"
WAITS = (FOR_TILES, FOR_PRODUCTS, FOR_ROOM, FOR_NUMBER, FOR_WARPS, FOR_STORES)
PHASES = (SOFTMAX, RESCALE, STARTS, FOR_PRODUCTS, FOR_TILES, EPILOGUE, FOR_STORES, FOR_NUMBER, FOR_WARPS, BEGIN)
_ENDS_A_TILE = (stamps.STORE, stamps.STORED, stamps.END)
_AMID_A_TILE = (stamps.ISSUED, stamps.DONE)


@dataclass(frozen=True)
class Span:
    """What went on from one cycle to another: a phase, or whose products or copy, with what it is in detail."""

    begin: int
    end: int
    phase: str
    what: str = ""

    @property
    def cycles(self) -> int:
        return self.end - self.begin


def phases(lane: Lane) -> list[Span]:
    """What a warpgroup did, without gaps, from its first stamp to its last."""
    named = _consumer(lane) if lane.consumes else _producer(lane)
    merged: list[Span] = []
    for span in named:
        if merged and (merged[-1].phase, merged[-1].what) == (span.phase, span.what):
            merged[-1] = replace(merged[-1], end=span.end)
        elif span.cycles:
            merged.append(span)
    return merged


def _wait(event: Event) -> tuple[str, str] | None:
    """The wait that an event ends, and for what; None where it ends none."""
    if event.kind == stamps.ARRIVED:
        if event.what == QUEUE:
            return FOR_NUMBER, ""
        return (FOR_ROOM if event.what.startswith(ROOM) else FOR_TILES), event.what.removeprefix(ROOM)
    waits = {stamps.BARRIER: FOR_WARPS, stamps.STORED: FOR_STORES, stamps.REGISTERS: BEGIN}
    return (waits[event.kind], "") if event.kind in waits else None


def _consumer(lane: Lane) -> list[Span]:
    spans, doing, running = [], BEGIN, deque[str]()
    for before, event in pairwise(lane.events):
        phase, what = _wait(event) or (doing, "")
        if event.kind == stamps.ISSUED:
            phase, what = STARTS, event.what
            running.append(event.what)
        elif event.kind == stamps.DONE:
            ended = [running.popleft() for _ in range(len(running) - int(event.what))]
            phase, what = FOR_PRODUCTS, " and ".join(dict.fromkeys(ended))
            doing = SOFTMAX if stamps.QK in what else RESCALE
        elif event.what == QUEUE:
            doing = BEGIN
        spans.append(Span(before.cycle, event.cycle, phase, what))
    return _with_epilogues(lane.events, spans)


def _with_epilogues(events: Sequence[Event], spans: Sequence[Span]) -> list[Span]:
    """What follows a tile's last product is its epilogue. That it was the last is known by what comes next."""
    named, is_over = [], False
    for event, span in zip(reversed(events[1:]), reversed(spans), strict=True):
        begins_a_tile = event.kind == stamps.ARRIVED and event.what in (QUEUE, "Q")
        if event.kind in _ENDS_A_TILE or begins_a_tile:
            is_over = True
        elif event.kind in _AMID_A_TILE or event.kind == stamps.ARRIVED:
            is_over = False
        named.append(replace(span, phase=EPILOGUE) if is_over and span.phase == RESCALE else span)
    return named[::-1]


def _producer(lane: Lane) -> list[Span]:
    spans, doing = [], BEGIN
    for before, event in pairwise(lane.events):
        phase, what = _wait(event) or (doing, "")
        if event.kind == stamps.COPY:
            phase, what = COPIES, event.what
        spans.append(Span(before.cycle, event.cycle, phase, what))
        if event.kind != stamps.REACHED:
            doing = COPIES if event.kind == stamps.COPY else DRAWS
    return spans


def products(lane: Lane) -> list[Span]:
    """The groups of products that a warpgroup started, as they were in flight."""
    spans: list[Span] = []
    running = deque[tuple[int, str]]()
    for before, event in pairwise(lane.events):
        if event.kind == stamps.ISSUED:
            running.append((before.cycle, event.what))
        elif event.kind == stamps.DONE:
            while len(running) > int(event.what):
                begin, what = running.popleft()
                spans.append(Span(begin, event.cycle, what, what))
    return spans


def copies(lanes: Sequence[Lane]) -> list[Span]:
    """The tiles that TMA brought to a CTA, each from its start until a warpgroup has seen that it is there."""
    started: Mapping[int, list[Event]] = _by_barrier(lanes, stamps.COPY)
    spans = []
    for barrier, begun in started.items():
        seen = [_by_barrier([lane], stamps.ARRIVED).get(barrier, []) for lane in lanes]
        for number, copy in enumerate(begun):
            ends = [each[number].cycle for each in seen if number < len(each)]
            if ends:
                spans.append(Span(copy.cycle, max(min(ends), copy.cycle), copy.what, copy.what))
    return sorted(spans, key=lambda span: span.begin)


def _by_barrier(lanes: Sequence[Lane], kind: str) -> dict[int, list[Event]]:
    found: dict[int, list[Event]] = defaultdict(list)
    for lane in lanes:
        for event in lane.events:
            if event.kind == kind:
                found[event.barrier].append(event)
    return found


def blocks(lane: Lane) -> int:
    """Blocks of keys: products Q K^T that a warpgroup started, or copies of K."""
    kind, what = (stamps.ISSUED, stamps.QK) if lane.consumes else (stamps.COPY, "K")
    return sum(event.kind == kind and what in event.what for event in lane.events)


def means(lanes: Sequence[Lane]) -> dict[str, float]:
    """Cycles a block that warpgroups spent in each phase, over all blocks of these lanes."""
    total: dict[str, float] = defaultdict(float)
    count = sum(map(blocks, lanes))
    for lane in lanes:
        for span in phases(lane):
            total[span.phase] += span.cycles
    return {phase: cycles / count for phase, cycles in total.items()} if count else {}


def extent(lanes: Sequence[Lane]) -> tuple[int, int]:
    """The first and the last cycle of some lanes."""
    return min(lane.events[0].cycle for lane in lanes), max(lane.events[-1].cycle for lane in lanes)


def residents(lanes: Sequence[Lane]) -> Iterator[tuple[int, list[Lane]]]:
    """The CTAs of an SM as its places hold them: a CTA goes where another has ended, or to a new place."""
    by_cta: dict[int, list[Lane]] = defaultdict(list)
    for lane in lanes:
        by_cta[lane.cta].append(lane)
    extents = {cta: extent(own) for cta, own in by_cta.items()}
    ends: list[int] = []
    for cta in sorted(by_cta, key=lambda cta: extents[cta]):
        begin, end = extents[cta]
        place = next((place for place, free in enumerate(ends) if free <= begin), len(ends))
        ends[place : place + 1] = [end]
        yield place, by_cta[cta]
