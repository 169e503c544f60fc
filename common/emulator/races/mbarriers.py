"""Races at mbarriers and the barrier of a cluster: who initialised them, and what an arrival tells those who wait.

An mbarrier is an object in memory, which whoever uses it has to know of; a copy, only after a fence (PTX ISA
9.7.13.4, .op_restrict). What copies do, agents.py adds.
"""

from dataclasses import dataclass

import numpy as np

from ..errors import RaceError
from ..execute.arrays import Mask, Rows, lanes_of
from ..execute.chunk import Chunk
from ..execute.cluster import RANK_BITS
from ..execute.mbarrier import mbarriers_of
from ..execute.shared import WINDOW
from ..execute.watcher import Access, Actor
from .order import AGENT, ORDERED, Agent, where_of
from .stamps import COLUMN_MASK, EPOCH, INSTRUCTION, INSTRUCTION_MASK, Touch, put
from .threads import BARRIER, IN_FLIGHT, OBJECT, RaceDetector

SCOPE = "mbarrier.arrive.release.cluster, whose scope has both CTAs in it (PTX ISA 8.5, 9.7.13.15.13)"
# PTX says that a copy accesses its mbarrier in the generic proxy (9.7.9.25.4.1), so that a barrier of the cluster is
# enough; after one of the CTA alone the CUDA programming guide asks for a fence: the copy completes at cluster scope.
INIT_FENCE = "fence.mbarrier_init by the thread that initialised it, then a barrier; or barrier.cluster"


@dataclass
class Made:
    """The initialisation of the mbarriers at one address: by CTA the thread, its epoch, the epoch that the first fence
    after it ended (0: none yet), and the last epoch of each thread that used it. `settled`: all warps are ordered after
    it."""

    index: int
    thread: np.ndarray
    epoch: np.ndarray
    fenced: np.ndarray
    uses: np.ndarray
    settled: bool = False


class MbarrierRaces(RaceDetector):
    """The race detector, with mbarriers and barriers of clusters."""

    def __init__(self, chunk: Chunk, num_warps: int, num_words: int, size: int = 1) -> None:
        super().__init__(chunk, num_warps, num_words, size)
        self._fenced_widely: set[int] = set()  # warps that have executed a fence of cluster scope or wider
        self._arrived_narrowly: set[int] = set()  # warps that arrived elsewhere with the scope of their CTA
        self._made: dict[int, Made] = {}

    def _part_tables(self, count: int) -> None:
        super()._part_tables(count)
        for made in self._made.values():
            for name in ("thread", "epoch", "fenced", "uses"):
                setattr(made, name, np.repeat(getattr(made, name), count, axis=0))

    def _of_rows(self, values: np.ndarray, rows: Rows) -> np.ndarray:
        """What belongs to the rows of the state, of one value a CTA."""
        return values[: self.order.num_rows] if rows is None else values[rows]

    # -- fences

    def fence(self, kind: str, warp: Actor, mask: Mask) -> None:
        """A fence by lanes of a warp: of the proxies, of initialised mbarriers, or of all beyond the CTA."""
        lanes, rows = lanes_of(mask, None)
        self._part(rows)
        if kind != "proxy":
            self._fenced_widely.add(warp.index)
        self._show_made(warp, lanes, rows)
        self.order.fence(warp.index, lanes, rows, of_proxies=kind == "proxy", is_wide=kind == "gpu")

    def _show_made(self, warp: Actor, lanes: np.ndarray | None, rows: Rows) -> None:
        """What lanes initialised is visible beyond their CTA to those who know of this epoch."""
        where, clock = where_of(rows), self.order.clock
        for made in self._made.values():
            thread = made.thread[where]
            mine = (thread >> 5 == warp.index) & (made.fenced[where] == 0) & (made.epoch[where] > 0)
            if lanes is not None:
                mine &= lanes[np.arange(len(lanes)), thread & 31]
            made.fenced[where] = np.where(mine, clock[where, warp.index], made.fenced[where])

    # -- mbarriers

    def mbarrier_made(self, address: int, access: Access) -> None:
        """mbarrier.init by one lane of each CTA: a write of memory that is no ordinary memory from now on."""
        self._part(access.rows)
        self._check(access, reads=True, atomics=True)
        where, count = where_of(access.rows), self.order.num_rows
        if address not in self._made:
            thread, epoch, fenced = (np.zeros(count, np.int64) for _ in range(3))
            self._made[address] = Made(access.index, thread, epoch, fenced, np.zeros((count, self.order.num_threads)))
        made = self._made[address]
        made.index, made.settled = access.index, False
        made.thread[where] = access.threads[0]
        made.epoch[where] = self.order.clock[where, access.warp.index]
        made.fenced[where] = 0
        made.uses[where] = 0
        put(self._writes, where, access.words, np.full((1, 1), OBJECT << EPOCH | access.index << INSTRUCTION))

    def mbarrier_unmade(self, address: int, access: Access) -> None:
        """mbarrier.inval: the memory becomes ordinary again, after all that was done with the mbarrier."""
        where, made = where_of(access.rows), self._made[address]
        columns = np.broadcast_to(np.arange(self.order.num_threads), made.uses[where].shape)
        known = self.order.known(access.warp.index, access.rows, columns, access.lanes[:1], ORDERED)  # type: ignore[index]
        bad = (made.uses[where] > known) & (columns != access.threads[0])
        if bad.any():
            row, thread = (int(n) for n in np.argwhere(bad)[0])
            earlier = f"warp {thread >> 5}, lane {thread & 31} used it before"
            raise self._report(access, row, 0, "an mbarrier is invalidated while others may use it", earlier, BARRIER)
        self._stamp(access)

    def mbarrier_used(
        self, address: int, warp: Actor, index: int, active: np.ndarray, rows: Rows, agent: bool = False
    ) -> None:
        """Lanes, (32) or (rows, 32), use an mbarrier; or name it to a copy (`agent`), which another unit carries out.

        Raises:
            RaceError: its initialisation is not ordered before, or was not fenced for a copy.
        """
        self._part(rows)
        made, where, lanes = self._made[address], where_of(rows), np.nonzero(np.atleast_2d(active).any(axis=0))[0]
        made.uses[where if isinstance(where, slice) else where[:, None], 32 * warp.index + lanes] = self.order.clock[
            where, warp.index
        ][:, None]
        if made.settled and not agent:
            return
        thread = np.broadcast_to(made.thread[where][:, None], (len(made.thread[where]), len(lanes)))
        own = thread == 32 * warp.index + lanes
        known = np.where(own, IN_FLIGHT, self.order.known(warp.index, rows, thread, lanes, ORDERED))
        unordered = (made.epoch[where][:, None] > known) & active[..., lanes]
        fenced = made.fenced[where][:, None]
        unfenced = agent & ((fenced == 0) | (fenced > known))
        if unordered.any() or unfenced.any():
            row = int(np.argwhere(unordered | unfenced)[0][0])
            if unordered.any():
                reason, mend = "no barrier orders the initialisation of an mbarrier before its use", BARRIER
            else:
                reason, mend = "a copy uses an mbarrier whose initialisation no fence makes visible to it", INIT_FENCE
            maker = int(made.thread[where][row])
            cta = self._chunk.cta_name(self._size * (row if rows is None else int(rows[row])))
            raise RaceError(
                f"race on shared memory: CTA {cta}, mbarrier at offset {self._offset(address)}: {reason}\n"
                f"  {self._warp_name(warp.index)}, lane {int(lanes[0])} uses it, {self._described(index)}\n"
                f"  {self._warp_name(maker >> 5)}, lane {maker & 31} initialised it, {self._described(made.index)}\n"
                f"  mend: {mend}"
            )
        made.settled = self.order.all_know(made.thread, made.epoch)

    def mbarrier_arrive(self, address: int, warp: Actor, mask: Mask, is_narrow: bool = False) -> None:
        """What the arriving threads did and know waits for the end of the phase. If the scope of the arrival is too
        narrow, it says only what agents have done that the threads waited for."""
        lanes, rows = lanes_of(mask, None)
        self._part(rows)
        if is_narrow:
            self._arrived_narrowly.add(warp.index)
        self.order.arrive(Agent("mbarrier", address), warp.index, lanes, rows, only_agents=is_narrow)

    def mbarrier_ends(self, address: int, phases: np.ndarray, rows: Rows) -> None:
        """A phase is over; `phases` (CTAs): how many are over now."""
        self._part(rows)
        self.order.end_phase(Agent("mbarrier", address), AGENT + self._of_rows(phases, rows), rows)

    def mbarrier_passed(self, address: int, warp: Actor, mask: Mask) -> None:
        """Lanes have seen the end of the last phase."""
        lanes, rows = lanes_of(mask, warp.live)
        self._part(rows)
        self.order.pass_phase(Agent("mbarrier", address), warp.index, lanes, rows)

    # -- the barrier of a cluster

    def cluster_arrive(self, warp: Actor, mask: Mask, releases: bool) -> None:
        """barrier.cluster.arrive. With .relaxed it says what its thread did only if that has executed a fence."""
        if releases or warp.index in self._fenced_widely:
            lanes, rows = lanes_of(mask, warp.live)
            self._part(rows)
            self._show_made(warp, lanes, rows)
            self.order.arrive(Agent("cluster", 0), warp.index, lanes, rows)

    def cluster_ends(self, rows: Rows) -> None:
        """All have arrived."""
        self._part(rows)
        self.order.end_phase(Agent("cluster", 0), np.zeros(1, np.int64), rows)

    def cluster_passed(self, warp: Actor, mask: Mask) -> None:
        """barrier.cluster.wait is over."""
        lanes, rows = lanes_of(mask, warp.live)
        self._part(rows)
        self.order.pass_phase(Agent("cluster", 0), warp.index, lanes, rows)

    def _phases(self, address: int) -> np.ndarray:
        """How many phases of the mbarriers at an address are over, one number a row."""
        rank = max(0, (address >> RANK_BITS) - 1)
        return mbarriers_of(self._chunk).phases(address & (1 << RANK_BITS) - 1)[rank :: self._size]

    def _offset(self, address: int) -> int:
        """The offset of an mbarrier in its CTA's shared memory."""
        return (address & (1 << RANK_BITS) - 1) - WINDOW

    # -- reports

    def _race_of_threads(
        self, access: Touch, row: int, word: int, stamp: int, did: str, other: int | None
    ) -> RaceError:
        """With the earlier access of a thread; says so if it arrived with a scope that does not reach this one."""
        warp = (stamp & COLUMN_MASK) >> 5 if other is None else other
        if warp in self._arrived_narrowly and warp // self._warps_per_cta != access.warp.index // self._warps_per_cta:
            earlier = self._described(stamp >> INSTRUCTION & INSTRUCTION_MASK)
            reason = "it has arrived at the mbarrier of another CTA, but with the scope of its own CTA"
            return self._report(access, row, word, reason, f"{self._warp_name(warp)} {did}, {earlier}", SCOPE)
        return super()._race(access, row, word, stamp, did, other)
