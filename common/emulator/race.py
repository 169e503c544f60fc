"""Races on shared memory, found by vector clocks (as in FastTrack), in whatever order the warps happened to run.

Every warp counts its epochs: its clock ticks at each barrier and at each bar.warp.sync. `known[w][u]` is the last epoch
of warp u that warp w is ordered after. Every word of shared memory remembers its last write and the last read of each
warp, each as one stamp {epoch, instruction, thread}. An access races with an earlier one of an epoch that its warp
does not know of; within a warp, bar.warp.sync orders epochs, and only a thread's own accesses need no order.

Where a kernel synchronises part of a warp, lanes have an order of their own, on top: `lane_known[w][l][m]` is the last
epoch of lane m of warp w that lane l is ordered after, and the last read of each lane is remembered besides.

A copy in flight is a write whose epoch is still to come: nobody may touch its words. It gets the epoch in which its
issuer waits for it. Words never written carry a later epoch still, so that the one comparison finds all three faults.

While all CTAs of a chunk do the same, they share one row of state; the first that strays gives each CTA its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .arrays import has_lanes
from .errors import MemoryAccessError, RaceError
from .shared import AccessPattern

if TYPE_CHECKING:
    from .scheduler import Chunk
    from .warp import Warp

# A stamp, from its low end: thread 12 bits, kind of access 4, instruction 24, epoch 23.
_KIND, _INSTRUCTION, _EPOCH = 12, 16, 40
_THREAD_MASK, _KIND_MASK, _INSTRUCTION_MASK = (1 << 12) - 1, 3, (1 << 24) - 1
# By one thread, by all lanes of a warp together (ldmatrix), by several lanes apart.
_PLAIN, _COLLECTIVE, _SEVERAL = 0, 1, 2
_IN_FLIGHT, _NEVER = 1 << 21, 1 << 22

# What has a row for each CTA.
_STATE = ("_writes", "_reads", "_atomics", "_clock", "_known", "_safe", "_lane_known", "_lane_reads", "_lane_atomics")

Rows = np.ndarray | None  # CTAs of the chunk; None: all
Where = slice | np.ndarray  # the rows of the state that belong to them


@dataclass(frozen=True)
class Access:
    """What one warp does to shared memory, alike in CTAs `rows`: the instruction, the pattern, and a verb for reports.
    A `collective` read is the whole warp's, as ldmatrix is."""

    warp: "Warp"
    index: int
    pattern: AccessPattern
    rows: Rows
    does: str
    collective: bool = False

    @property
    def threads(self) -> np.ndarray:
        """The thread of the CTA that touches each of the pattern's words."""
        return 32 * self.warp.index + self.pattern.word_lanes


@dataclass(frozen=True)
class AgentAccess:
    """What asynchronous work does to shared memory, alike in CTAs `rows`.

    Attributes:
        warp, index, lane: who issued it: the warp, the instruction, the lane (None: the warp as a whole, as for wgmma).
        units: the 16-byte units that it touches, as offset // 16 in shared memory; each once.
        rows: CTAs of the chunk; None: all.
        does: a verb for reports, as "reads by wgmma".
    """

    warp: "Warp"
    index: int
    lane: int | None
    units: np.ndarray
    rows: Rows
    does: str


class RaceDetector:
    """The clocks of all warps and the stamps of all words of a chunk's shared memory.

    Reads do not race with each other, nor do atomic operations: of both, the last of each warp is remembered.
    """

    def __init__(self, chunk: "Chunk", num_warps: int, num_words: int, by_lanes: bool) -> None:
        self._chunk, self._num_warps = chunk, num_warps
        self._writes = np.full((1, num_words), _NEVER << _EPOCH, np.int64)
        self._reads = np.zeros((1, num_warps, num_words), np.int64)
        self._atomics: np.ndarray | None = None  # like _reads, from the first atomic operation on
        self._clock = np.ones((1, num_warps), np.int64)
        self._known = np.zeros((1, num_warps, num_warps), np.int64)
        # Stamps below these are of epochs that a warp knows of, of whichever warp they are.
        self._safe = np.full((1, num_warps), 1 << _EPOCH, np.int64)
        self._barriers: dict[int, np.ndarray] = {}
        self._lane_known = np.zeros((1, num_warps, 32, 32), np.int64) if by_lanes else None
        self._lane_reads = np.zeros((1, num_warps, 32, num_words), np.int64) if by_lanes else None
        self._lane_atomics = np.zeros_like(self._lane_reads) if by_lanes else None

    def _part(self, rows: Rows) -> None:
        """Gives each CTA its own row of the state as soon as some CTAs do what others do not."""
        count = len(self._chunk.cta_ids)
        if rows is not None and len(self._clock) < count:
            for name in _STATE:
                if (state := getattr(self, name)) is not None:
                    setattr(self, name, np.repeat(state, count, axis=0))
            self._barriers = {number: np.repeat(clock, count, axis=0) for number, clock in self._barriers.items()}

    # -- order

    def sync_warp(self, warp: int, rows: Rows) -> None:
        """A warp's lanes see each other's earlier accesses."""
        self._part(rows)
        where = _where(rows)
        self._known[where, warp, warp] = self._clock[where, warp]
        self._clock[where, warp] += 1

    def sync_lanes(self, warp: int, lanes: np.ndarray) -> None:
        """These lanes, (1 or CTAs, 32), alone see each other's earlier accesses, and what each of them has seen."""
        assert self._lane_known is not None
        rows = None if len(lanes) == 1 else np.nonzero(has_lanes(lanes))[0]
        self._part(rows)
        where = _where(rows)
        known, lanes = self._lane_known[where, warp], lanes if rows is None else lanes[rows]
        together = np.where(lanes[:, :, None], known, 0).max(axis=1)
        together = np.where(lanes, self._clock[where, warp][:, None], together)
        self._lane_known[where, warp] = np.where(lanes[:, :, None], together[:, None], known)
        self._clock[where, warp] += 1

    def arrive(self, barrier: int, warp: int, rows: Rows) -> None:
        """What a warp did and knows becomes known to those that leave the barrier."""
        self._part(rows)
        where = _where(rows)
        clock = self._barriers.setdefault(barrier, np.zeros((len(self._clock), self._num_warps), np.int64))
        brought = self._known[where, warp].copy()
        brought[:, warp] = self._clock[where, warp]
        clock[where] = np.maximum(clock[where], brought)
        self._clock[where, warp] += 1

    def leave(self, barrier: int, warps: Sequence[int], rows: Rows) -> None:
        """A barrier opens for warps that wait at it. All go on in one new epoch, later than any that was brought."""
        self._part(rows)
        where = _where(rows)
        clock = self._barriers[barrier][where].copy()
        top = clock.max(axis=1)
        clock[:, list(warps)] = top[:, None]
        for warp in warps:
            known = np.maximum(self._known[where, warp], clock)
            self._known[where, warp] = known
            self._clock[where, warp] = top + 1
            self._safe[where, warp] = (known.min(axis=1) + 1) << _EPOCH

    # -- accesses

    def read(self, access: Access) -> None:
        """A load."""
        self._part(access.rows)
        self._check_against(access, atomics=True)
        self._note(self._reads, self._lane_reads, access)

    def write(self, access: Access) -> None:
        """A store."""
        self._part(access.rows)
        self._check_against(access, reads=True, atomics=True)
        self._stamp(access)

    def atomic(self, access: Access) -> None:
        """Atomic operations."""
        self._part(access.rows)
        if self._atomics is None:
            self._atomics = np.zeros_like(self._reads)
        self._check_against(access, reads=True)
        self._note(self._atomics, self._lane_atomics, access)

    def issue_copy(self, access: Access) -> None:
        """The start of asynchronous copies."""
        self._part(access.rows)
        self._check_against(access, reads=True, atomics=True)
        self._stamp(access, epoch=_IN_FLIGHT)

    def land_copy(self, access: Access) -> None:
        """The issuing lanes have waited for their copies, which thereby become their writes."""
        self._part(access.rows)
        self._stamp(access)

    # -- asynchronous agents

    def agent_writes(self, access: AgentAccess, mbarrier: int) -> None:
        """The issue of a copy into shared memory that tells the mbarrier at this address when it lands."""

    def agent_lands(self, access: AgentAccess, mbarrier: int) -> None:
        """The copy has landed; to be called before the mbarrier is told."""

    def wgmma_reads(self, access: AgentAccess) -> None:
        """The issue of a wgmma: its warpgroup reads from now on until a wait_group."""

    def wgmma_commits(self, warp: "Warp", rows: Rows) -> None:
        """wgmma.commit_group by one warp."""

    def wgmma_waits(self, warp: "Warp", pending: int, rows: Rows) -> None:
        """wgmma.wait_group by one warp, which all but the latest `pending` groups of its warpgroup have passed."""

    def bulk_reads(self, access: AgentAccess) -> None:
        """The issue of a copy out of shared memory that a bulk group of the issuing lane tracks."""

    def bulk_commits(self, warp: "Warp", index: int, mask: np.ndarray | None) -> None:
        """cp.async.bulk.commit_group by lanes of a warp."""

    def bulk_waits(self, warp: "Warp", index: int, pending: int, mask: np.ndarray | None) -> None:
        """cp.async.bulk.wait_group{.read} by lanes of a warp: all but the latest `pending` groups of each have read."""

    def _check_against(self, access: Access, reads: bool = False, atomics: bool = False) -> None:
        """Raises unless the last writes, and the last reads and atomics if so said, are ordered before this access."""
        where, words = _where(access.rows), access.pattern.words
        safe = self._safe[where, access.warp.index]
        stamps = self._writes[where].take(words, axis=1)
        if _reaches(stamps, safe):
            self._check_writer(access, stamps)
        for wanted, table, by_lane, did in (
            (reads, self._reads, self._lane_reads, "read it"),
            (atomics, self._atomics, self._lane_atomics, "updated it"),
        ):
            if wanted and table is not None:
                stamps = table[where].take(words, axis=2)
                if _reaches(stamps, safe):
                    self._check_others(access, stamps, by_lane, did)

    def _note(self, table: np.ndarray, by_lane: np.ndarray | None, access: Access) -> None:
        """Notes the last access of this warp in the table of reads or of atomics, and of its lanes in the other."""
        where, words, warp = _where(access.rows), access.pattern.words, access.warp.index
        now = (self._clock[where, warp] << _EPOCH)[:, None] | access.index << _INSTRUCTION
        own = table[:, warp]
        if access.collective:
            _put(own, where, words, now | _COLLECTIVE << _KIND)
            return
        before = own[where].take(words, axis=1)
        others = (before >> _EPOCH == now >> _EPOCH) & (before & _THREAD_MASK != access.threads)
        kind = np.where(others | access.pattern.repeated, _SEVERAL << _KIND, 0)
        _put(own, where, words, now | access.threads | kind)
        if by_lane is not None:
            own = by_lane[:, warp].reshape(len(by_lane), -1)
            _put(own, where, access.pattern.word_lanes * by_lane.shape[-1] + words, now | access.threads)

    def _stamp(self, access: Access, epoch: int | None = None) -> None:
        """Notes the last write of the words, in the warp's present epoch if none is named."""
        where = _where(access.rows)
        epochs = self._clock[where, access.warp.index] if epoch is None else np.full(1, epoch)
        who = access.index << _INSTRUCTION | _PLAIN << _KIND | access.threads
        _put(self._writes, where, access.pattern.words, (epochs << _EPOCH)[:, None] | who)

    # -- the exact checks, when a quick one failed

    def _check_writer(self, access: Access, stamps: np.ndarray) -> None:
        """Raises if one of the words' last writes (stamps (rows, words)) is not ordered before this access."""
        epoch, thread = stamps >> _EPOCH, stamps & _THREAD_MASK
        never = epoch == _NEVER
        if access.does in ("reads", "updates") and never.any():
            row, word = (int(n) for n in np.argwhere(never)[0])
            place, who = self._place(access, row, word), self._who(access, word)
            raise MemoryAccessError(f"read of shared memory that nobody has written yet: {place}\n  {who}")
        where, warp = _where(access.rows), access.warp.index
        known = np.take_along_axis(self._known[where, warp], thread >> 5, axis=1)
        if self._lane_known is not None:
            by_lane = np.take_along_axis(self._known_to_lanes(access), (thread & 31)[:, None], axis=1)[:, 0]
            known = np.where(thread >> 5 == warp, np.maximum(known, by_lane), known)
        by_others = (thread != access.threads) | (epoch == _IN_FLIGHT) | access.collective
        bad = (epoch > known) & ~never & by_others
        if bad.any():
            row, word = (int(n) for n in np.argwhere(bad)[0])
            raise self._race(access, row, word, int(stamps[row, word]), "wrote it")

    def _known_to_lanes(self, access: Access) -> np.ndarray:
        """The last epoch of each lane of its own warp that an access is ordered after, (rows, 32, words)."""
        assert self._lane_known is not None
        known = self._lane_known[_where(access.rows), access.warp.index]
        if access.collective:  # all lanes access, but a lane's own accesses need no order
            others = np.where(np.eye(32, dtype=bool), _NEVER, known).min(axis=1)
            return np.repeat(others[:, :, None], len(access.pattern.words), axis=2)
        return known[:, access.pattern.word_lanes].transpose(0, 2, 1)

    def _check_others(self, access: Access, stamps: np.ndarray, by_lane: np.ndarray | None, did: str) -> None:
        """Raises if one of the words' last accesses (stamps (rows, warps, words)) is not ordered before this one."""
        warp = access.warp.index
        bad = stamps >> _EPOCH > self._known[_where(access.rows), warp][:, :, None]
        if by_lane is None:
            own = stamps[:, warp]
            kind = own >> _KIND & _KIND_MASK
            by_others = (kind == _SEVERAL) | (own & _THREAD_MASK != access.threads) | access.collective
            bad[:, warp] &= (kind != _COLLECTIVE) & by_others
        else:
            bad[:, warp] = False
            self._check_lanes(access, by_lane, did)
        if bad.any():
            row, other, word = (int(n) for n in np.argwhere(bad)[0])
            raise self._race(access, row, word, int(stamps[row, other, word]), did, other)

    def _check_lanes(self, access: Access, by_lane: np.ndarray, did: str) -> None:
        """The same for the last accesses of each lane of the access's own warp."""
        where, warp = _where(access.rows), access.warp.index
        stamps = by_lane[where, warp].take(access.pattern.words, axis=2)
        known = np.maximum(self._known[where, warp, warp][:, None, None], self._known_to_lanes(access))
        by_others = access.collective | (np.arange(32)[:, None] != access.pattern.word_lanes)
        bad = (stamps >> _EPOCH > known) & by_others
        if bad.any():
            row, lane, word = (int(n) for n in np.argwhere(bad)[0])
            raise self._race(access, row, word, int(stamps[row, lane, word]), did, warp)

    def check_agreement(self, access: Access, differs: np.ndarray) -> None:
        """Raises if lanes of one store put different values into one word: `differs` (CTAs, lanes) lost theirs."""
        if differs.any():
            row, lane = (int(n) for n in np.argwhere(differs)[0])
            word = int(np.argmax(access.pattern.repeated & (access.pattern.word_lanes == lane)))
            place, who = self._place(access, row, word), self._who(access, word)
            raise RaceError(f"race on shared memory: {place}: lanes of one store write different values to it\n  {who}")

    # -- reports

    def _place(self, access: Access, row: int, word: int) -> str:
        row = row if access.rows is None else int(access.rows[row])
        offset = int(access.pattern.words[word]) * self._chunk.machine.granule
        return f"CTA {self._chunk.cta_name(row)}, shared memory offset {offset}"

    def _who(self, access: Access, word: int) -> str:
        lane = int(access.pattern.word_lanes[word])
        return f"warp {access.warp.index}, lane {lane} {access.does}, {self._described(access.index)}"

    def _described(self, index: int) -> str:
        return self._chunk.program.kernel.instructions[index].described()

    def _race(self, access: Access, row: int, word: int, stamp: int, did: str, other: int | None = None) -> RaceError:
        """A race with the earlier access that left `stamp`, of warp `other` (for a write, the stamp says which)."""
        thread, kind = stamp & _THREAD_MASK, stamp >> _KIND & _KIND_MASK
        warp = thread >> 5 if other is None else other
        if stamp >> _EPOCH == _IN_FLIGHT:
            reason, did = (
                "it is the target of a copy in flight, and no wait of its issuer lies between",
                "issued the copy",
            )
        elif warp == access.warp.index:
            reason = "other lanes of the warp touched it, and no __syncwarp lies between"
        else:
            reason = "no barrier orders the two"
        lanes = {_COLLECTIVE: "", _SEVERAL: ", several lanes"}.get(kind, f", lane {thread & 31}")
        earlier = self._described(stamp >> _INSTRUCTION & _INSTRUCTION_MASK)
        return RaceError(
            f"race on shared memory: {self._place(access, row, word)}: {reason}\n"
            f"  {self._who(access, word)}\n"
            f"  warp {warp}{lanes} {did}, {earlier}"
        )


def _where(rows: Rows) -> Where:
    """The rows of the state that belong to these CTAs: all of it, be it one row, if they are all."""
    return slice(None) if rows is None else rows


def _reaches(stamps: np.ndarray, safe: np.ndarray) -> bool:
    """Whether a stamp of any row (rows, ...) is at or above the row's limit."""
    if len(stamps) == 1:
        return bool(stamps.max() >= safe[0])
    return bool((stamps.reshape(len(stamps), -1).max(axis=1) >= safe).any())


def _put(state: np.ndarray, where: Where, words: np.ndarray, stamps: np.ndarray) -> None:
    """Stamps (rows or 1, words or 1) into state (rows, all words)."""
    if isinstance(where, slice):
        state[:, words] = stamps
    else:
        state[where[:, None], words] = stamps
