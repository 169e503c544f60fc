"""What was found out about a kernel: its limits, by what is gained without them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flashladder.common import catalog
from flashladder.common.catalog import Version
from flashladder.common.compiler.sass import Code, SassInstruction
from flashladder.common.compiler.sass.instruction import Position
from flashladder.common.compiler.sources import own_line
from flashladder.common.own import FIRST

FLOOR = 0.03  # gains below are not told from none
MOST_LINES = 3


@dataclass(frozen=True)
class Limit:
    """Something that takes time."""

    name: str  # of catalog.LIMITERS
    without: float  # the time that would be left without it
    lines: tuple[tuple[Position, float], ...]  # of the kernel, and their shares of it, the largest first

    @property
    def meaning(self) -> str:
        return catalog.LIMITERS[self.name]


@dataclass(frozen=True)
class Diagnosis:
    """The limits of a kernel, the costliest first. Times are in one unit, which `unit` names."""

    version: Version
    code: Code
    gpu: str  # its title
    time: float
    unit: str
    tensor: float  # what the tensor cores need of the time for the products
    limits: tuple[Limit, ...]
    memory: float = 0.0  # what a full GPU's memory takes for the keys of it; 0 where speed is not told in bytes

    @property
    def is_measured(self) -> bool:
        return self.unit == MICROSECONDS

    @property
    def experience(self) -> tuple[float, float] | None:
        """How many times as long as predicted a GPU took for such rungs (docs/cost-model.md); None: not compared."""
        is_known = self.version.home is None and self.version.ladder == FIRST and "02" <= self.version.number <= "24"
        return (1.13, 1.2) if is_known and not self.is_measured else None

    def gain(self, limit: Limit) -> float:
        """By how much the kernel would be faster without a limit: 0.1 is 10 %."""
        return self.time / limit.without - 1 if limit.without > 0 else math.inf

    @property
    def limiter(self) -> Limit | None:
        """The costliest limit; None where none costs as much as FLOOR."""
        return next((limit for limit in self.limits if self.gain(limit) >= FLOOR), None)

    @property
    def advice(self) -> Limit | None:
        """The costliest limit that a later rung's idea is against; None where there is none."""
        return next((limit for limit in self.limits if self.gain(limit) >= FLOOR and self.ideas(limit)), None)

    def ideas(self, limit: Limit) -> list[Version]:
        """The later rungs for the same instructions whose idea is against a limit, the nearest first."""
        ladder, own = self.version.its_ladder(), self.version.instruction_set
        later = ladder[ladder.index(self.version) + 1 :]
        return [rung for rung in later if limit.name in rung.addresses and rung.instruction_set == own]


CYCLES = "cycles of an SM for a CTA's pass through the main loop, predicted"
MICROSECONDS = "us of a launch, measured"


def ranked(limits: Iterable[Limit]) -> tuple[Limit, ...]:
    """The costliest first."""
    return tuple(sorted(limits, key=lambda limit: limit.without))


def by_line(weighted: Iterable[tuple[SassInstruction, float]]) -> tuple[tuple[Position, float], ...]:
    """The lines of the kernel with the largest shares of a weight."""
    return shares((own_line(instruction.source), weight) for instruction, weight in weighted if instruction.source)


def shares(weighted: Iterable[tuple[Sequence[str | int], float]]) -> tuple[tuple[Position, float], ...]:
    """The places with the largest shares of a weight."""
    found: Counter[Position] = Counter()
    for place, weight in weighted:
        found[Position(str(place[0]), int(place[1]))] += weight  # type: ignore[assignment]  # a Counter of floats
    total = found.total()
    return tuple((place, weight / total) for place, weight in found.most_common(MOST_LINES) if weight)
