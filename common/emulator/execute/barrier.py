"""Barriers of a CTA, the plainest gate (PTX ISA 9.7.13.1, "bar, barrier")."""

from dataclasses import dataclass
from functools import partial

import numpy as np

from ..errors import SynchronisationError
from .arrays import Array, Mask, has_lanes, narrow
from .chunk import Chunk, Waiting, Warp


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

    def enter(self, chunk: Chunk, warp: Warp, mask: Mask, block: int) -> None:
        """Lanes arrive; those that only arrive, or fail the guard, go on."""
        instruction = chunk.program.blocks[block].last
        mask = warp.pass_guard(mask, self.guard, block + 1)
        aligned = instruction.opcode.startswith("bar.") or ".aligned" in instruction.opcode
        if aligned and mask is not None:
            live = np.ones((1, 1), bool) if warp.live is None else warp.live
            warp.require(instruction.index, live, mask, "a barrier for whole warps")
        for number in np.unique(self.numbers).tolist():
            chosen = mask if self.numbers.size == 1 else narrow(mask, self.numbers == number)
            if chosen is not None and not chosen.any():
                continue
            barrier = chunk.gate(f"barrier {number}", partial(Barrier, number, chunk))
            if ".arrive" in instruction.opcode:
                warp.send(block + 1, chosen)
            else:
                barrier.waiting.append(Waiting(warp, block + 1, chosen, self.target))
            barrier.arrive(warp, instruction.index, chosen, self, aligned)


class Barrier:
    """A named barrier of every CTA (PTX ISA 9.7.13.1, "bar, barrier"): opens when as many threads have arrived as it
    expects, and is ready for its next use at once."""

    def __init__(self, number: int, chunk: Chunk) -> None:
        self.number = number
        self.waiting: list[Waiting] = []
        self._chunk = chunk
        num_ctas = len(chunk.cta_ids)
        self._arrived, self._expected, self._votes = (np.zeros(num_ctas, np.int64) for _ in range(3))
        self._members = np.zeros((num_ctas, len(chunk.warps)), bool)
        self._reduction = ""
        self._leaving: list[tuple[Waiting, Array | None]] = []

    def arrive(self, warp: Warp, index: int, mask: Mask, call: BarrierCall, whole_warp: bool) -> None:
        """Lanes of one warp arrive. An aligned barrier counts a warp as a whole.

        Raises:
            SynchronisationError: the barrier awaits another number of threads already, or the warp has arrived before.
        """
        lanes = np.broadcast_to(True if mask is None else mask, (len(self._arrived), 32))
        present = has_lanes(lanes)
        total = self._chunk.machine.num_threads
        awaited = -(-total // 32) * 32 if whole_warp else total
        threads = np.broadcast_to(awaited if call.threads is None else call.threads, lanes.shape)
        expected = threads.max(axis=1, where=lanes, initial=0)
        if call.threads is not None and (expected[present] % 32).any():
            row = int(np.argmax(present & (expected % 32 > 0)))
            raise SynchronisationError(
                f"a barrier for {expected[row]} threads, which are no whole warps\n  {warp.at(index, row)}"
            )
        self._check(warp, index, present, expected, whole_warp)
        self._arrived += 32 * present if whole_warp else lanes.sum(axis=1)
        self._expected = np.where(present, expected, self._expected)
        self._members[:, warp.index] |= present
        if call.predicate is not None:
            wanted = ~call.predicate if call.reduction == "and" else call.predicate  # "and": whether none says no
            self._votes += (lanes & wanted).sum(axis=1)
            self._reduction = call.reduction
        if self._chunk.watcher:
            self._chunk.watcher.arrive(self.number, warp.index, self._chunk.rows(mask))
        full = present & (self._arrived >= self._expected)
        if full.any():
            self._complete(full)

    def _check(self, warp: Warp, index: int, present: np.ndarray, expected: np.ndarray, whole_warp: bool) -> None:
        other = present & (self._arrived > 0) & (expected != self._expected)
        again = present & self._members[:, warp.index] & whole_warp
        if other.any() or again.any():
            row = int(np.argmax(other | again))
            wrong = (
                f"{self._expected[row]} threads are awaited there already, not {expected[row]}"
                if other[row]
                else "the warp has arrived there before, and the barrier has not opened since"
            )
            raise SynchronisationError(f"wrong use of barrier {self.number}: {wrong}\n  {warp.at(index, row)}")

    def _complete(self, full: np.ndarray) -> None:
        """The barrier opens in these CTAs; those who wait there leave with the next call of open."""
        votes = self._votes.copy()[:, None]
        result = {"and": votes == 0, "or": votes > 0, "popc": votes.astype(np.uint32)}.get(self._reduction)
        self._arrived[full] = self._votes[full] = 0
        self._members[full] = False
        leaving = [part for each in self.waiting if (part := each.part(full))]
        self.waiting = [part for each in self.waiting if (part := each.part(~full))] if not full.all() else []
        self._leaving += [(each, result) for each in leaving]
        if self._chunk.watcher:
            rows = None if full.all() else np.nonzero(full)[0]
            self._chunk.watcher.leave(self.number, sorted({each.warp.index for each in leaving}), rows)

    def open(self, stuck: bool) -> bool:
        """See Gate."""
        leaving, self._leaving = self._leaving, []
        for each, result in leaving:
            each.go_on(result)
        return bool(leaving)

    def progress(self, each: Waiting, row: int) -> str:
        """See Gate."""
        return f"barrier {self.number} ({self._arrived[row]} of {self._expected[row]} threads)"
