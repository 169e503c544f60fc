"""Races on shared memory, found by vector clocks (as in FastTrack), whatever the order in which the warps happened to run.

Every warp counts its epochs: its clock ticks at each barrier and at each bar.warp.sync. `known[w][u]` is the last epoch of
warp u that warp w is ordered after. Every word of shared memory remembers its last write and the last read of each
warp, each as one stamp {epoch, instruction, thread}. An access races with an earlier one of an epoch that its warp does
not know of; within a warp, epochs are ordered by bar.warp.sync, and only a thread's own accesses need no order.

A copy in flight is a write whose epoch is still to come: nobody may touch its words. It gets the epoch in which its
issuer waits for it. Words never written carry a later epoch still, so that the one comparison finds all three faults.

While all CTAs of a chunk do the same, they share one row of state; the first that strays gives each CTA its own.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .errors import MemoryAccessError, RaceError
from .shared import AccessPattern

if TYPE_CHECKING:
    from .scheduler import Chunk
    from .warp import Warp

# A stamp, from its low end: thread 16 bits, instruction 24 bits, epoch 23 bits.
_EPOCH, _INSTRUCTION = 40, 16
_THREAD_MASK, _INSTRUCTION_MASK = (1 << 16) - 1, (1 << 24) - 1
_IN_FLIGHT = 1 << 21
_NEVER = 1 << 22
# Instead of a reading thread: all lanes together (ldmatrix), or several lanes apart.
_COLLECTIVE, _SEVERAL = 0xFFFF, 0xFFFE

Rows = np.ndarray | None  # CTAs of the chunk; None: all


class RaceDetector:
    """The clocks of all warps and the stamps of all words of a chunk's shared memory."""

    def __init__(self, chunk: "Chunk", num_warps: int, num_words: int) -> None:
        self._chunk, self._num_warps = chunk, num_warps
        self._writes = np.full((1, num_words), _NEVER << _EPOCH, np.int64)
        self._reads = np.zeros((1, num_warps, num_words), np.int64)
        self._clock = np.ones((1, num_warps), np.int64)
        self._known = np.zeros((1, num_warps, num_warps), np.int64)
        # Stamps below these are of epochs that a warp knows of, of whichever warp they are.
        self._safe = np.full((1, num_warps), 1 << _EPOCH, np.int64)
        self._barriers: dict[int, np.ndarray] = {}

    # -- rows

    def _rows(self, rows: Rows) -> "slice | np.ndarray":
        """An index of the state for these CTAs; gives each CTA its own row as soon as they differ."""
        if rows is None:
            return slice(None)
        if len(self._clock) == 1 and len(self._chunk.cta_ids) > 1:
            count = len(self._chunk.cta_ids)
            for name in ("_writes", "_reads", "_clock", "_known", "_safe"):
                setattr(self, name, np.repeat(getattr(self, name), count, axis=0))
            self._barriers = {number: np.repeat(clock, count, axis=0) for number, clock in self._barriers.items()}
        return rows

    # -- order

    def sync_warp(self, warp: int, rows: Rows) -> None:
        """A warp's lanes see each other's earlier accesses."""
        where = self._rows(rows)
        self._known[where, warp, warp] = self._clock[where, warp]
        self._clock[where, warp] += 1

    def arrive(self, barrier: int, warp: int, rows: Rows) -> None:
        """What a warp did and knows becomes known to those that leave the barrier."""
        where = self._rows(rows)
        clock = self._barriers.setdefault(barrier, np.zeros((len(self._clock), self._num_warps), np.int64))
        brought = self._known[where, warp].copy()
        brought[:, warp] = self._clock[where, warp]
        clock[where] = np.maximum(clock[where], brought)
        self._clock[where, warp] += 1

    def leave(self, barrier: int, warps: Sequence[int], rows: Rows) -> None:
        """A barrier opens for warps that wait at it. All go on in one new epoch, later than any that was brought."""
        where = self._rows(rows)
        clock = self._barriers[barrier][where].copy()
        top = clock.max(axis=1)
        clock[:, list(warps)] = top[:, None]
        for warp in warps:
            known = np.maximum(self._known[where, warp], clock)
            self._known[where, warp] = known
            self._clock[where, warp] = top + 1
            self._safe[where, warp] = (known.min(axis=1) + 1) << _EPOCH

    # -- accesses

    def read(self, warp: "Warp", index: int, pattern: AccessPattern, rows: Rows, collective: bool) -> None:
        """A load by the pattern's lanes; `collective` if the whole warp reads as one, as ldmatrix does."""
        where, words = self._rows(rows), pattern.words
        stamps = self._writes[where].take(words, axis=1)
        if (stamps.max(axis=1) >= self._safe[where, warp.index]).any():
            lanes = np.full(len(words), -1) if collective else pattern.word_lanes
            self._check_writer(warp, index, pattern, rows, stamps, lanes, "reads")
        stamp = int(self._clock[where, warp.index][0]) << _EPOCH | index << _INSTRUCTION
        if rows is not None or len(self._clock) > 1:
            stamp = (self._clock[where, warp.index] << _EPOCH | index << _INSTRUCTION)[:, None]
        if collective:
            self._put(self._reads[:, warp.index], where, words, stamp | _COLLECTIVE)
            return
        readers = np.where(pattern.repeated, _SEVERAL, 32 * warp.index + pattern.word_lanes)
        before = self._reads[where, warp.index].take(words, axis=1)
        again = (before >> _EPOCH == stamp >> _EPOCH) & (before & _THREAD_MASK != readers)
        self._put(self._reads[:, warp.index], where, words, stamp | np.where(again, _SEVERAL, readers))

    def write(self, warp: "Warp", index: int, pattern: AccessPattern, rows: Rows) -> None:
        """A store by the pattern's lanes."""
        where = self._check_write(warp, index, pattern, rows, "writes")
        self._stamp(warp, index, pattern, where, self._clock[where, warp.index])

    def issue_copy(self, warp: "Warp", index: int, pattern: AccessPattern, rows: Rows) -> None:
        """The start of asynchronous copies by the pattern's lanes."""
        where = self._check_write(warp, index, pattern, rows, "issues a copy to it")
        self._stamp(warp, index, pattern, where, np.full(1, _IN_FLIGHT))

    def land_copy(self, warp: "Warp", index: int, pattern: AccessPattern, rows: Rows) -> None:
        """The issuing lanes have waited for their copies, which thereby become their writes."""
        where = self._rows(rows)
        self._stamp(warp, index, pattern, where, self._clock[where, warp.index])

    def _stamp(self, warp: "Warp", index: int, pattern: AccessPattern, where: "slice | np.ndarray", epoch: np.ndarray) -> None:
        stamp = (epoch << _EPOCH)[:, None] | index << _INSTRUCTION | (32 * warp.index + pattern.word_lanes)
        self._put(self._writes, where, pattern.words, stamp)

    @staticmethod
    def _put(state: np.ndarray, where: "slice | np.ndarray", words: np.ndarray, stamps: "np.ndarray | int") -> None:
        if isinstance(where, slice):
            state[:, words] = stamps
        else:
            state[where[:, None], words] = stamps

    def _check_write(self, warp: "Warp", index: int, pattern: AccessPattern, rows: Rows, action: str) -> "slice | np.ndarray":
        where, words = self._rows(rows), pattern.words
        safe = self._safe[where, warp.index]
        stamps = self._writes[where].take(words, axis=1)
        if (stamps.max(axis=1) >= safe).any():
            self._check_writer(warp, index, pattern, rows, stamps, pattern.word_lanes, action)
        readers = self._reads[where].take(words, axis=2)
        if (readers.max(axis=(1, 2)) >= safe).any():
            self._check_readers(warp, index, pattern, rows, readers, action)
        return where

    # -- the exact checks, when a quick one failed

    def _check_writer(
        self, warp: "Warp", index: int, pattern: AccessPattern, rows: Rows, stamps: np.ndarray, lanes: np.ndarray, action: str
    ) -> None:
        """Raises if one of the words' last writes (stamps (rows, words)) is not ordered before this access."""
        epoch, thread = stamps >> _EPOCH, stamps & _THREAD_MASK
        never = epoch == _NEVER
        if action == "reads" and never.any():
            row, word = (int(n) for n in np.argwhere(never)[0])
            raise self._uninitialised(warp, index, pattern, rows, row, word)
        known = np.take_along_axis(self._known[self._rows(rows), warp.index], thread >> 5, axis=1)
        bad = (epoch > known) & ~never & ((thread != 32 * warp.index + lanes) | (epoch == _IN_FLIGHT))
        if bad.any():
            row, word = (int(n) for n in np.argwhere(bad)[0])
            raise self._race(warp, index, pattern, rows, row, word, int(stamps[row, word]), action, "wrote it")

    def _check_readers(self, warp: "Warp", index: int, pattern: AccessPattern, rows: Rows, stamps: np.ndarray, action: str) -> None:
        """Raises if a read of one of the words (stamps (rows, warps, words)) is not ordered before this write."""
        epoch, thread = stamps >> _EPOCH, stamps & _THREAD_MASK
        bad = epoch > self._known[self._rows(rows), warp.index][:, :, None]
        own = thread[:, warp.index]
        bad[:, warp.index] &= (own != _COLLECTIVE) & (own != 32 * warp.index + pattern.word_lanes)
        if bad.any():
            row, reader, word = (int(n) for n in np.argwhere(bad)[0])
            stamp = int(stamps[row, reader, word])
            raise self._race(warp, index, pattern, rows, row, word, stamp, action, "read it", reader)

    # -- reports

    def _place(self, pattern: AccessPattern, rows: Rows, row: int, word: int) -> str:
        row = row if rows is None else int(rows[row])
        return f"CTA {self._chunk.cta_name(row)}, shared memory offset {int(pattern.words[word]) * self._chunk.shared.granule}"

    def _uninitialised(self, warp: "Warp", index: int, pattern: AccessPattern, rows: Rows, row: int, word: int) -> MemoryAccessError:
        who = f"warp {warp.index}, lane {int(pattern.word_lanes[word])} reads it, {self._at(index)}"
        return MemoryAccessError(f"read of shared memory that was never written: {self._place(pattern, rows, row, word)}\n  {who}")

    def _at(self, index: int) -> str:
        instruction = self._chunk.program.kernel.instructions[index]
        return f"at {instruction.where()}: `{instruction.text}`"

    def _race(
        self, warp: "Warp", index: int, pattern: AccessPattern, rows: Rows, row: int, word: int, stamp: int, action: str, earlier: str,
        reader: int | None = None,
    ) -> RaceError:  # fmt: skip
        thread, other = stamp & _THREAD_MASK, stamp >> _INSTRUCTION & _INSTRUCTION_MASK
        other_warp = reader if reader is not None else thread >> 5
        if stamp >> _EPOCH == _IN_FLIGHT:
            reason, earlier = "it is the target of a copy in flight, and no wait of its issuer lies between", "issued the copy"
        elif other_warp == warp.index:
            reason = "other lanes of the warp touched it, and no __syncwarp lies between"
        else:
            reason = "no barrier orders the two"
        lane = {_COLLECTIVE: "", _SEVERAL: ", several lanes"}.get(thread, f", lane {thread & 31}")
        return RaceError(
            f"race on shared memory: {self._place(pattern, rows, row, word)}: {reason}\n"
            f"  warp {warp.index}, lane {int(pattern.word_lanes[word])} {action}, {self._at(index)}\n"
            f"  warp {other_warp}{lane} {earlier}, {self._at(other)}"
        )
