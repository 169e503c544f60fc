"""What a launch left in the buffer of stamps, as events with names; and these as a CSV, below what was run."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from flashladder.common.errors import ResultsError
from flashladder.common.records import run_files
from flashladder.common.records.log import open_text
from flashladder.common.studies.timeline import stamps
from flashladder.common.studies.timeline.stamps import ARRIVED, COPY, EVENTS, LANES, PAYLOAD_BITS, Site

COLUMNS = ("lane", "cta", "warpgroup", "cycle", "event", "what", "barrier", "line")
QUEUE, ROOM = "a tile number", "room for "


@dataclass(frozen=True)
class Event:
    """A stamp: when, in cycles since the first one of all, and what a warpgroup had come to (stamps.Site).

    `what` of an arrival: the tensor that has come, or for whose tile there is room, or the number of a tile.
    """

    cycle: int
    kind: str
    what: str = ""
    barrier: int = -1  # the address of an mbarrier
    line: int = 0  # of kernel.cu


@dataclass(frozen=True)
class Lane:
    """The stamps of a warpgroup, in the order of time."""

    cta: int
    warpgroup: int
    events: tuple[Event, ...]

    @property
    def is_full(self) -> bool:
        """Whether it went on when there was no more room for stamps."""
        return len(self.events) == EVENTS

    @property
    def consumes(self) -> bool:
        """Whether it starts products."""
        return any(event.kind == stamps.ISSUED for event in self.events)


@dataclass(frozen=True)
class Timeline:
    """The lanes of an SM, and what was run, in words."""

    lanes: tuple[Lane, ...]
    facts: Mapping[str, str]


def decode(words: np.ndarray, sites: Sequence[Site]) -> tuple[Lane, ...]:
    """The lanes of a buffer of (EVENTS, LANES, 2) words: the clock, and the site with its payload.

    The clock has 32 bits: a launch is taken to be shorter than 2^31 cycles, a second.
    """
    words = np.asarray(words, np.uint32).reshape(EVENTS, LANES, 2)
    starts = words[0, :, 0][words[0, :, 1] > 0]
    if not len(starts):
        return ()
    zero = starts[np.argmin((starts - starts[0]).astype(np.int32))]
    lanes = []
    for column in words.transpose(1, 0, 2):
        taken = column[column[:, 1] > 0]
        if not len(taken):
            continue
        cycles = (taken[:, 0] - zero).astype(np.int32)
        cta, warpgroup = stamps.unpack_who(int(taken[0, 1]) % (1 << PAYLOAD_BITS))
        events = tuple(_event(int(cycle), int(word), sites) for cycle, word in zip(cycles, taken[:, 1], strict=True))
        lanes.append(Lane(cta, warpgroup, events))
    return tuple(_named(lanes))


def _event(cycle: int, word: int, sites: Sequence[Site]) -> Event:
    site = sites[(word >> PAYLOAD_BITS) - 1]
    barrier = word % (1 << PAYLOAD_BITS) if site.kind in (ARRIVED, COPY) else -1
    return Event(cycle, site.kind, site.what, barrier, site.line)


def _named(lanes: Sequence[Lane]) -> Iterator[Lane]:
    """Says what each arrival is of: copies tell which barriers count which tensor's bytes."""
    tensors = {event.barrier: event.what for lane in lanes for event in lane.events if event.kind == COPY}
    for lane in lanes:
        events = list(lane.events)
        for place, event in enumerate(events):
            if event.kind == ARRIVED:
                following = events[place + 1] if place + 1 < len(events) else event
                other = ROOM + following.what if following.kind == COPY else QUEUE
                events[place] = replace(event, what=tensors.get(event.barrier, other))
        yield replace(lane, events=tuple(events))


def write(timeline: Timeline, path: Path) -> None:
    """The facts as lines of `# name: value`, then the events: CSV, compressed."""
    text = io.StringIO()
    for name, value in timeline.facts.items():
        text.write(f"# {name}: {value}\n")
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for number, lane in enumerate(timeline.lanes):
        for e in lane.events:
            barrier = f"{e.barrier:#x}" if e.barrier >= 0 else ""
            rows.writerow((number, lane.cta, lane.warpgroup, e.cycle, e.kind, e.what, barrier, e.line or ""))
    path.parent.mkdir(parents=True, exist_ok=True)
    run_files.write(path, text.getvalue().encode())


def picture_of(path: Path) -> Path:
    """Where the picture of a file's events is."""
    return path.with_name(f"{path.name.removesuffix('.gz').removesuffix('.csv')}.svg")


def read(path: Path) -> Timeline:
    """What `write` wrote, or a CSV that is not compressed. ResultsError where it is damaged."""
    with open_text(path) as file:
        lines = file.read().splitlines()
    facts = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# ") and ": " in line)
    lanes: dict[int, Lane] = {}
    try:
        rows = csv.DictReader(line for line in lines if not line.startswith("#"))
        for row in rows:
            lane = lanes.get(number := int(row["lane"])) or Lane(int(row["cta"]), int(row["warpgroup"]), ())
            barrier, line = int(row["barrier"] or "-1", 0), int(row["line"] or 0)
            event = Event(int(row["cycle"]), row["event"], row["what"], barrier, line)
            lanes[number] = replace(lane, events=(*lane.events, event))
    except (KeyError, TypeError, ValueError) as error:
        raise ResultsError(f"{path} is no timeline ({error}): record it again with `flashladder timeline`") from None
    return Timeline(tuple(lanes.values()), facts)
