"""Gates: what a warp waits at. A lane that comes to a closed gate is put aside until the gate opens.

A Barrier is the one kind there is yet. Another kind (an mbarrier, whose try_wait must not be executed as a spin) is a
Gate too, and lives in Chunk.gates under a key of its own.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .arrays import Mask, narrow

if TYPE_CHECKING:
    from .warp import Warp


@dataclass(frozen=True)
class Waiting:
    """Lanes of a warp that wait at a gate, and the block they go on with."""

    warp: "Warp"
    block: int
    mask: Mask

    def includes(self, row: int) -> bool:
        """Whether lanes of this CTA of the chunk are among them."""
        return self.mask is None or bool(self.mask[row if len(self.mask) > 1 else 0].any())


@dataclass(frozen=True)
class Opening:
    """Lanes that go on, in CTAs `rows` of the chunk (None: all)."""

    leaving: list[Waiting]
    rows: np.ndarray | None


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
        self._arrived = np.zeros(num_ctas, np.int64)
        self._expected = np.zeros(num_ctas, np.int64)

    def arrive(self, mask: Mask, expected: np.ndarray | int, whole_warp: bool) -> None:
        """Lanes of one warp arrive; `expected` threads are awaited. An aligned barrier counts a warp as a whole."""
        lanes = np.broadcast_to(True if mask is None else mask, (len(self._arrived), 32))
        present = lanes.any(axis=1)
        self._arrived += 32 * present if whole_warp else lanes.sum(axis=1)
        self._expected = np.where(
            present, np.broadcast_to(expected, lanes.shape).max(axis=1, where=lanes, initial=0), self._expected
        )

    def open(self) -> Opening | None:
        full = (self._arrived >= self._expected) & (self._arrived > 0)
        if not full.any():
            return None
        self._arrived[full] = 0
        waiting, self.waiting = self.waiting, []
        if full.all():
            return Opening(waiting, None)
        leaving: list[Waiting] = []
        for each in waiting:
            for part, target in ((full, leaving), (~full, self.waiting)):
                mask = narrow(each.mask, part[:, None])
                if mask.any():
                    target.append(Waiting(each.warp, each.block, mask))
        return Opening(leaving, np.nonzero(full)[0])

    def progress(self, row: int) -> str:
        return f"barrier {self.key} ({self._arrived[row]} of {self._expected[row]} threads)"
