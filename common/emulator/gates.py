"""Gates: what a warp waits at. A lane that comes to a closed gate is put aside until the gate opens.

A Barrier is the one kind there is yet. Another kind (an mbarrier, whose try_wait must not be executed as a spin) is a
Gate too, and lives in Chunk.gates under a key of its own.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .arrays import Array, Mask, has_lanes, narrow

if TYPE_CHECKING:
    from .warp import Warp


@dataclass(frozen=True)
class BarrierCall:
    """The operands of a barrier: its number, the threads it awaits (None: all), the guard of the instruction, and for
    bar.red the reduction, the predicate and the slot of the register that gets the result."""

    numbers: Array
    threads: Array | None
    guard: Array | None
    reduction: str = ""
    predicate: Array | None = None
    target: int | None = None


@dataclass(frozen=True)
class Waiting:
    """Lanes of a warp that wait at a gate, the block they go on with, and the register that awaits a value."""

    warp: "Warp"
    block: int
    mask: Mask
    target: int | None = None

    def includes(self, row: int) -> bool:
        """Whether lanes of this CTA of the chunk are among them."""
        return self.mask is None or bool(self.mask[row if len(self.mask) > 1 else 0].any())


@dataclass(frozen=True)
class Opening:
    """Lanes that go on, in CTAs `rows` of the chunk (None: all), and what a reduction gave in each CTA."""

    leaving: list[Waiting]
    rows: np.ndarray | None
    result: Array | None = None


class Gate(Protocol):
    """What the scheduler needs of a gate. `key` names it to the race detector, whose clocks it carries."""

    key: int
    waiting: list[Waiting]

    def open(self) -> Opening | None:
        """Lets those go on whose wait is over; None if there are none."""

    def progress(self, row: int) -> str:
        """How far a CTA's gate is from opening, for a deadlock's report."""


class Barrier:
    """A named barrier of every CTA (PTX ISA, "bar, barrier"): opens when as many threads have arrived as it expects."""

    def __init__(self, number: int, num_ctas: int) -> None:
        self.key = number
        self.waiting: list[Waiting] = []
        self._arrived, self._expected, self._votes = (np.zeros(num_ctas, np.int64) for _ in range(3))
        self._reduction = ""

    def arrive(self, mask: Mask, call: BarrierCall, expected: int, whole_warp: bool) -> None:
        """Lanes of one warp arrive; `expected` threads are awaited if the call does not say. An aligned barrier counts
        a warp as a whole."""
        lanes = np.broadcast_to(True if mask is None else mask, (len(self._arrived), 32))
        present = has_lanes(lanes)
        self._arrived += 32 * present if whole_warp else lanes.sum(axis=1)
        threads = np.broadcast_to(expected if call.threads is None else call.threads, lanes.shape)
        self._expected = np.where(present, threads.max(axis=1, where=lanes, initial=0), self._expected)
        if call.predicate is not None:
            wanted = ~call.predicate if call.reduction == "and" else call.predicate  # "and": whether none says no
            self._votes += (lanes & wanted).sum(axis=1)
            self._reduction = call.reduction

    def open(self) -> Opening | None:
        full = (self._arrived >= self._expected) & (self._arrived > 0)
        if not full.any():
            return None
        votes = self._votes.copy()[:, None]
        result = {"and": votes == 0, "or": votes > 0, "popc": votes.astype(np.uint32)}.get(self._reduction)
        self._arrived[full] = self._votes[full] = 0
        waiting, self.waiting = self.waiting, []
        if full.all():
            return Opening(waiting, None, result)
        leaving: list[Waiting] = []
        for each in waiting:
            for part, place in ((full, leaving), (~full, self.waiting)):
                mask = narrow(each.mask, part[:, None])
                if mask.any():
                    place.append(replace(each, mask=mask))
        return Opening(leaving, np.nonzero(full)[0], result)

    def progress(self, row: int) -> str:
        return f"barrier {self.key} ({self._arrived[row]} of {self._expected[row]} threads)"
