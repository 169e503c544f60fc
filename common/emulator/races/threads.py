"""Races on shared memory, found by vector clocks (as in FastTrack), in whatever order the warps happened to run.

Every word of shared memory remembers its last write and the last read of each warp, each as one stamp {epoch,
instruction, column}. An access races with an earlier one of an epoch that it is not ordered after; who is ordered after
what, order.py tells. Only a thread's own accesses need no order. What agents do, agents.py adds.

A copy in flight is a write whose epoch is still to come: nobody may touch its words. A cp.async gets the epoch in which
its issuer waits for it, a bulk copy the phase of the mbarrier with which it lands. Words never written carry a later
epoch still, and so do those of mbarriers, so that the one comparison finds all these faults.
"""

from collections.abc import Sequence

import numpy as np

from ..errors import MemoryAccessError, RaceError, SynchronisationError
from ..execute.arrays import Rows, lanes_of
from ..execute.chunk import Chunk
from ..execute.watcher import Access
from .order import NEVER, ORDERED, Order, where_of
from .program_facts import facts_of
from .stamps import (
    COLLECTIVE,
    COLUMN_MASK,
    EPOCH,
    INSTRUCTION,
    INSTRUCTION_MASK,
    KIND,
    KIND_MASK,
    SEVERAL,
    LastAccesses,
    Touch,
    put,
    reaches,
    taken,
)

IN_FLIGHT, OBJECT = 1 << 21, 3 << 20  # epochs of a write that is still to come, and of an mbarrier

BARRIER = "a barrier between the two: __syncthreads(), or an mbarrier at which the first arrives and the second waits"
SYNCWARP = "__syncwarp() between the two; __syncthreads() if other warps touch it too"
FOLLOWERS = "__syncwarp() after the lane that waits, or a wait by every lane"
LEADER = "__syncwarp() before the lane arrives that does so for its warp"


class RaceDetector:
    """The clocks of all warps and the stamps of all words of a chunk's shared memory.

    Reads do not race with each other, nor do atomic operations: of both, the last of each warp is remembered.
    """

    def __init__(self, chunk: Chunk, num_warps: int, num_words: int, size: int = 1) -> None:
        """`size` CTAs of a cluster make up one row of state, side by side: so many warps and words have all of them."""
        facts = facts_of(chunk.program)
        self._chunk, self._num_words, self._size = chunk, num_words, size
        self._num_rows = len(chunk.cta_ids) // size
        self._warps_per_cta, self._words_per_cta = num_warps // size, num_words // size
        self.order = Order(self._num_rows, num_warps, facts.num_planes)
        self._writes = np.full((1, num_words), NEVER << EPOCH, np.int64)
        self._reads = LastAccesses(self.order, num_warps, num_words, facts.syncs_lanes, facts.used_loads)
        self._atomics = LastAccesses(self.order, num_warps, num_words, facts.syncs_lanes)

    def _part(self, rows: Rows) -> None:
        """Gives each CTA its own row of the state as soon as some CTAs do what others do not."""
        if rows is not None and self.order.num_rows < self._num_rows:
            self.order.part()
            self._part_tables(self._num_rows)

    def _part_tables(self, count: int) -> None:
        self._writes = np.repeat(self._writes, count, axis=0)
        self._reads.part(count)
        self._atomics.part(count)

    # -- order

    def sync_warp(self, warp: int, rows: Rows) -> None:
        """A warp's lanes see each other's earlier accesses."""
        self._part(rows)
        self.order.sync_warp(warp, rows)

    def sync_lanes(self, warp: int, lanes: np.ndarray) -> None:
        """These lanes, (1 or CTAs, 32), alone see each other's earlier accesses, and what each of them has seen."""
        _, rows = lanes_of(lanes, None)
        self._part(rows)
        self.order.sync_lanes(warp, lanes if rows is None else lanes[rows], rows)

    def arrive(self, barrier: int, warp: int, rows: Rows) -> None:
        """What a warp did and knows becomes known to those that leave the barrier."""
        self._part(rows)
        self.order.arrive(barrier, warp, None, rows)

    def leave(self, barrier: int, warps: Sequence[int], rows: Rows) -> None:
        """A barrier opens for warps that wait at it."""
        self._part(rows)
        self.order.leave(barrier, warps, rows)

    # -- accesses

    def read(self, access: Access, at: int | None = None) -> None:
        """A load. `at`: see clusters.py; a CTA alone has no other memory than its own."""
        self._part(access.rows)
        self._check(access, atomics=True)
        self._reads.note(access)

    def write(self, access: Access, at: int | None = None) -> None:
        """A store."""
        self._part(access.rows)
        self._check(access, reads=True, atomics=True)
        self._stamp(access)

    def atomic(self, access: Access, at: int | None = None) -> None:
        """Atomic operations."""
        self._part(access.rows)
        self._check(access, reads=True)
        self._atomics.note(access)

    def issue_copy(self, access: Access) -> None:
        """The start of asynchronous copies."""
        self._part(access.rows)
        self._check(access, reads=True, atomics=True)
        self._stamp(access, epoch=IN_FLIGHT)

    def land_copy(self, access: Access) -> None:
        """The issuing lanes have waited for their copies, which thereby become their writes."""
        self._part(access.rows)
        self._stamp(access)

    def _stamp(self, access: Access, epoch: int | None = None) -> None:
        """Notes the last write of the words, in the warp's present epoch if none is named."""
        where = where_of(access.rows)
        epochs = self.order.clock[where, access.warp.index] if epoch is None else np.full(1, epoch)
        put(
            self._writes, where, access.words, (epochs << EPOCH)[:, None] | access.index << INSTRUCTION | access.threads
        )

    def _check(self, access: Touch, reads: bool = False, atomics: bool = False) -> None:
        """Raises unless the last writes, and the last reads and atomics if so said, are ordered before this access."""
        where = where_of(access.rows)
        stamps = taken(self._writes, where, access.words)
        if reaches(stamps, self.order.safe[where, access.warp.index]):
            self._check_writer(access, stamps)
        self._check_accesses(access, reads, atomics)

    def _check_accesses(self, access: Touch, reads: bool, atomics: bool) -> None:
        """The same for the last reads and atomics alone."""
        for wanted, table, did in ((reads, self._reads, "read it"), (atomics, self._atomics, "updated it")):
            if wanted and (found := table.first_unordered(access)):
                raise self._race(access, found.row, found.word, found.stamp, did, found.warp)

    # -- the exact checks, when a quick one failed

    def _check_writer(self, access: Touch, stamps: np.ndarray) -> None:
        """Raises if one of the words' last writes (stamps (rows, words)) is not ordered before this access."""
        epoch, column = stamps >> EPOCH, stamps & COLUMN_MASK
        never, object_ = epoch == NEVER, epoch == OBJECT
        if (never.any() and self._needs_values(access)) or object_.any():
            row, word = (int(n) for n in np.argwhere(object_ if object_.any() else never)[0])
            place, who = self._place(access, row, word), self._who(access, word)
            if object_.any():
                made = self._described(int(stamps[row, word]) >> INSTRUCTION & INSTRUCTION_MASK)
                raise SynchronisationError(
                    f"an mbarrier touched as ordinary memory: {place}\n  {who}\n  initialised {made}"
                )
            raise MemoryAccessError(f"read of shared memory that nobody has written yet: {place}\n  {who}")
        known = self.order.known(access.warp.index, access.rows, column, access.lanes, ORDERED)
        by_others = (column != access.threads) | (epoch == IN_FLIGHT) if access.lanes is not None else True
        bad = (epoch > known) & ~never & by_others
        if bad.any():
            row, word = (int(n) for n in np.argwhere(bad)[0])
            raise self._race(access, row, word, int(stamps[row, word]), "wrote it")

    def _needs_values(self, access: Touch) -> bool:
        return access.does in ("reads", "updates")

    def check_agreement(self, access: Access, differs: np.ndarray) -> None:
        """Raises if lanes of one store put different values into one word: `differs` (CTAs, lanes) lost theirs."""
        if differs.any():
            row, lane = (int(n) for n in np.argwhere(differs)[0])
            word = int(np.argmax(access.pattern.repeated & (access.pattern.word_lanes == lane)))
            place, who = self._place(access, row, word), self._who(access, word)
            raise RaceError(f"race on shared memory: {place}: lanes of one store write different values to it\n  {who}")

    # -- reports

    def _place(self, access: Touch, row: int, word: int) -> str:
        row = row if access.rows is None else int(access.rows[row])
        rank, place = divmod(int(access.words[word]), self._words_per_cta)
        offset = place * self._chunk.machine.granule
        return f"CTA {self._chunk.cta_name(row * self._size + rank)}, shared memory offset {offset}"

    def _warp_name(self, warp: int) -> str:
        rank, number = divmod(warp, self._warps_per_cta)
        return f"warp {number}" + (f" of CTA rank {rank}" if self._size > 1 else "")

    def _who(self, access: Touch, word: int) -> str:
        lane = "" if access.lanes is None else f", lane {access.threads[min(word, len(access.threads) - 1)] & 31}"
        return f"{self._warp_name(access.warp.index)}{lane} {access.does}, {self._described(access.index)}"

    def _described(self, index: int) -> str:
        return self._chunk.program.kernel.instructions[index].described()

    def _race(self, access: Touch, row: int, word: int, stamp: int, did: str, other: int | None = None) -> RaceError:
        """A race with the earlier access that left `stamp`, of warp `other` (for a write, the stamp says which)."""
        thread, kind = stamp & COLUMN_MASK, stamp >> KIND & KIND_MASK
        warp = thread >> 5 if other is None else other
        if stamp >> EPOCH == IN_FLIGHT:
            reason = "it is the target of a copy in flight, and no wait of its issuer lies between"
            mend, did = "cp.async.wait_group by the threads that issued the copy, then a barrier", "issued the copy"
        elif warp == access.warp.index:
            reason, mend = "other lanes of the warp touched it, and no __syncwarp lies between", SYNCWARP
        elif self._has_waited(access, row, thread, stamp >> EPOCH):
            reason, mend = "another lane of this warp has waited for it, but not this one", FOLLOWERS
        elif kind != COLLECTIVE and self._has_arrived(access, row, word, warp, stamp >> EPOCH):
            reason, mend = "another lane of that warp has arrived at a barrier, but not this one", LEADER
        else:
            reason, mend = "no barrier orders the two", BARRIER
        return self._report(access, row, word, reason, self._did(warp, did, stamp), mend)

    def _did(self, warp: int, did: str, stamp: int) -> str:
        """Who of a warp left a stamp, and where."""
        kind, lane = stamp >> KIND & KIND_MASK, stamp & COLUMN_MASK & 31
        lanes = {COLLECTIVE: "", SEVERAL: ", several lanes"}.get(kind, f", lane {lane}")
        return f"{self._warp_name(warp)}{lanes} {did}, {self._described(stamp >> INSTRUCTION & INSTRUCTION_MASK)}"

    def _has_waited(self, access: Touch, row: int, column: int, epoch: int) -> bool:
        """Whether any lane of the access's own warp is ordered after this epoch."""
        row = row if access.rows is None else int(access.rows[row])
        return self.order.known_to_any([access.warp.index], column, row) >= epoch

    def _has_arrived(self, access: Touch, row: int, word: int, warp: int, epoch: int) -> bool:
        """Whether the access to a word is ordered after other lanes of a warp in this epoch or a later one."""
        rows = np.array([row if access.rows is None else int(access.rows[row])]) if self.order.num_rows > 1 else None
        lanes = access.lanes if access.lanes is None or len(access.lanes) == 1 else access.lanes[word : word + 1]
        return bool((self.order.known_of_warps(access.warp.index, rows, lanes)[0, warp] >= epoch).any())

    def _report(self, access: Touch, row: int, word: int, reason: str, earlier: str, mend: str) -> RaceError:
        """What a RaceError says: where, why, the two accesses, and what would order them."""
        return RaceError(
            f"race on shared memory: {self._place(access, row, word)}: {reason}\n"
            f"  {self._who(access, word)}\n"
            f"  {earlier}\n"
            f"  mend: {mend}"
        )
