"""Races with asynchronous agents: bulk copies (TMA), wgmma, and the mbarriers through which they and threads meet.

An agent accesses shared memory in the async proxy, from its issue until somebody has waited for it:

    a copy into shared memory   writes until a wait has seen the phase of its mbarrier end (PTX ISA 9.7.9.25.1.2)
    wgmma                       reads until wgmma.wait_group of its warpgroup (9.7.15.7.3)
    a copy out of shared memory reads until cp.async.bulk.wait_group.read of the thread that issued it (9.7.9.25.1.1)

It is ordered after what its issuer is ordered after, and what threads wrote needs a proxy fence by them besides
(9.7.9.25.2, 9.7.15.4). It tells nothing of its issuer to those who wait for it (8.9.1.1); but what it overwrites is
forgotten, as whoever is ordered after the copy is so after that.

What a copy overwrites, threads may have read. A barrier alone does not order the two: causality order between
operations of different proxies needs a proxy fence on the way (8.9.5), and without one "R cannot read from W" (8.10.6)
does not hold. A load that a product has used has come back, and needs none (used_loads.py).
"""

from collections.abc import Sequence

import numpy as np

from ..errors import RaceError
from ..execute.arrays import ALL_LANES, Mask, Rows
from ..execute.chunk import Chunk
from ..execute.watcher import UNIT, Access, Actor, AgentAccess
from .mbarriers import MbarrierRaces
from .order import AGENT, FENCED, ORDERED, USED, Agent, where_of
from .program_facts import facts_of
from .stamps import COLUMN_MASK, EPOCH, INSTRUCTION, INSTRUCTION_MASK, Touch, put, taken
from .threads import BARRIER, FOLLOWERS, IN_FLIGHT
from .used_loads import UsedLoads

WARPGROUP = 4  # warps

FENCE = "fence.proxy.async by the threads that wrote it, then a barrier before the issue"
FENCE_OF_READS = (
    "fence.proxy.async by the threads that read it, then the barrier; what becomes registers of a wgmma may be given "
    "back after wgmma.wait_group instead"
)


class AgentRaces(MbarrierRaces):
    """The race detector, with agents. Reads of agents are noted by unit: the last of each agent."""

    def __init__(self, chunk: Chunk, num_warps: int, num_words: int, size: int = 1) -> None:
        super().__init__(chunk, num_warps, num_words, size)
        self._per_unit = UNIT // chunk.machine.granule
        self._agent_reads: dict[int, np.ndarray] = {}  # by column: (rows, units)
        self._groups: dict[int | Agent, np.ndarray] = {}  # by warp (wgmma), or by agent: groups committed, (rows)
        self._used = UsedLoads(facts_of(chunk.program).loads_of_products, num_warps)

    def _part_tables(self, count: int) -> None:
        super()._part_tables(count)
        for table in (self._agent_reads, self._groups):
            for key, state in table.items():
                table[key] = np.repeat(state, count, axis=0)  # type: ignore[index]
        self._used.part(count)

    def read(self, access: Access, at: int | None = None) -> None:
        """A load. What products will use of it is remembered."""
        super().read(access, at)
        where, warp = where_of(access.rows), access.warp.index
        self._used.load(warp, access.index, where, self.order.clock[where, warp])

    # -- agents

    def agent_writes(self, access: AgentAccess, mbarrier: int, at: int | None = None) -> None:
        """The issue of a copy into shared memory that tells the mbarrier at this address when it lands. `at`: the rank
        of the CTA whose memory and mbarrier these are, if not the own."""
        self._part(access.rows)
        active = np.isin(ALL_LANES, ALL_LANES if access.lanes is None else access.lanes)
        self.mbarrier_used(mbarrier, access.warp, access.index, active, access.rows, agent=True)
        self._check_agent(access)
        self._check_accesses(access, reads=True, atomics=True)
        self._check_crossed(access)
        self._stamp_agent(access, mbarrier, np.full(1, IN_FLIGHT))
        self._reads.clear(access.rows, access.words)
        self._atomics.clear(access.rows, access.words)
        for table in self._agent_reads.values():
            put(table, where_of(access.rows), access.units, np.zeros((1, 1), np.int64))

    def agent_lands(self, access: AgentAccess, mbarrier: int, at: int | None = None) -> None:
        """The copy has landed; to be called before the mbarrier is told."""
        self._part(access.rows)
        phases = self._of_rows(self._phases(mbarrier), access.rows)
        self._stamp_agent(access, mbarrier, AGENT + phases + 1)

    def _stamp_agent(self, access: AgentAccess, mbarrier: int, epochs: np.ndarray) -> None:
        column = self.order.column(Agent("mbarrier", mbarrier))
        stamps = (epochs << EPOCH)[:, None] | access.index << INSTRUCTION | column
        put(self._writes, where_of(access.rows), access.words, stamps)

    def wgmma_reads(self, access: AgentAccess) -> None:
        """The issue of a wgmma: its warpgroup reads from now on until a wait_group."""
        self._note_read(access, Agent("wgmma", access.warp.index // WARPGROUP), access.warp.index)

    def wgmma_starts(self, warp: Actor, products: Sequence[int], rows: Rows) -> None:
        """The issue of wgmmas, which have their registers' values."""
        self._part(rows)
        self._used.start(warp.index, products, where_of(rows))

    def wgmma_commits(self, warp: Actor, rows: Rows) -> None:
        """wgmma.commit_group by one warp."""
        self._part(rows)
        self._group(warp.index)[where_of(rows)] += 1
        self._used.commit(warp.index, where_of(rows))

    def wgmma_waits(self, warp: Actor, pending: int, rows: Rows) -> None:
        """wgmma.wait_group by one warp, which all but the latest `pending` groups of its warpgroup have passed."""
        self._part(rows)
        column = self.order.column(Agent("wgmma", warp.index // WARPGROUP))
        self.order.learn(warp.index, column, AGENT + self._group(warp.index)[where_of(rows)] - pending, None, rows)
        used = self._used.waited(warp.index, pending, where_of(rows))
        if used.any() and (used[:, None] > self.order.known_of_itself(warp.index, rows, ALL_LANES, USED)).any():
            self.order.use(warp.index, used, rows)

    def bulk_reads(self, access: AgentAccess) -> None:
        """The issue of a copy out of shared memory that a bulk group of the issuing lane tracks."""
        assert access.lane is not None
        thread = Agent("bulk", access.warp.index, access.lane)
        self._note_read(access, thread, thread)

    def bulk_commits(self, warp: Actor, mask: Mask) -> None:
        """cp.async.bulk.commit_group by lanes of a warp."""
        for lane, rows in self._each_lane(mask):
            self._part(rows)
            self._group(Agent("bulk", warp.index, lane))[where_of(rows)] += 1

    def bulk_waits(self, warp: Actor, pending: int, mask: Mask) -> None:
        """cp.async.bulk.wait_group{.read} by lanes of a warp: all but the latest `pending` groups of each have read."""
        for lane, rows in self._each_lane(mask):
            thread = Agent("bulk", warp.index, lane)
            if thread in self._groups:
                self._part(rows)
                epochs = AGENT + self._group(thread)[where_of(rows)] - pending
                self.order.learn(warp.index, self.order.column(thread), epochs, lane, rows)

    def _each_lane(self, mask: Mask) -> Sequence[tuple[int, Rows]]:
        if mask is None:
            return [(lane, None) for lane in range(32)]
        lanes = np.broadcast_to(mask, (len(mask), 32))
        found = [(lane, lanes[:, lane]) for lane in range(32) if lanes[:, lane].any()]
        return [(lane, None if rows.all() else np.nonzero(rows)[0]) for lane, rows in found]

    def _group(self, key: int | Agent) -> np.ndarray:
        if key not in self._groups:
            self._groups[key] = np.zeros(self.order.num_rows, np.int64)
        return self._groups[key]

    def _note_read(self, access: AgentAccess, agent: Agent, group: int | Agent) -> None:
        """An agent reads; it is done when somebody knows that the group which is now being filled is."""
        self._part(access.rows)
        self._check_agent(access)
        column, where = self.order.column(agent), where_of(access.rows)
        if column not in self._agent_reads:
            num_units = -(-self._num_words // self._per_unit)
            self._agent_reads[column] = np.zeros((self.order.num_rows, num_units), np.int64)
        epochs = AGENT + self._group(group)[where] + 1
        stamps = (epochs << EPOCH)[:, None] | access.index << INSTRUCTION | column
        put(self._agent_reads[column], where, access.units, stamps)

    # -- checks

    def _check_agent(self, access: AgentAccess) -> None:
        """Raises unless the last writes of its words are ordered before an agent's access, and fenced for its proxy."""
        stamps = taken(self._writes, where_of(access.rows), access.words)
        if (stamps == stamps[:, :1]).all():
            stamps = stamps[:, :1]
        self._check_writer(access, stamps)
        epoch, column = stamps >> EPOCH, stamps & COLUMN_MASK
        known = self.order.known(access.warp.index, access.rows, column, access.lanes, FENCED)
        if access.lanes is not None:
            by_itself = self.order.known_of_itself(access.warp.index, access.rows, access.lanes, FENCED)
            known = np.where(column == access.threads, by_itself, known)
        bad = (column < self.order.num_threads) & (epoch < AGENT) & (epoch > known)
        if bad.any():
            row, word = (int(n) for n in np.argwhere(bad)[0])
            thread, index = int(column[row, word]), int(stamps[row, word]) >> INSTRUCTION & INSTRUCTION_MASK
            reason = "an ordinary write, and no fence.proxy.async of its thread lies between"
            earlier = f"{self._warp_name(thread >> 5)}, lane {thread & 31} wrote it, {self._described(index)}"
            raise self._report(access, row, word, reason, earlier, FENCE)

    def _check_crossed(self, access: AgentAccess) -> None:
        """Raises if a copy may overwrite what a thread still reads, though a barrier orders the two."""
        for table, did in ((self._reads, "read it"), (self._atomics, "updated it")):
            if found := table.first_uncrossed(access):
                earlier = self._did(found.warp, did, found.stamp)
                reason = "it was read in another proxy, and no fence.proxy.async lies between: the load may come late"
                raise self._report(access, found.row, found.word, reason, earlier, FENCE_OF_READS)

    def _check_accesses(self, access: Touch, reads: bool, atomics: bool) -> None:
        super()._check_accesses(access, reads, atomics)
        if not reads or not self._agent_reads:
            return
        where, units = where_of(access.rows), access.words // self._per_unit
        for column, table in self._agent_reads.items():
            stamps = taken(table, where, units)
            columns = np.full((len(stamps), 1), column)
            bad = stamps >> EPOCH > self.order.known(access.warp.index, access.rows, columns, access.lanes, ORDERED)
            if bad.any():
                row, word = (int(n) for n in np.argwhere(bad)[0])
                raise self._race(access, row, word, int(stamps[row, word]), "reads it")

    def check_end(self) -> None:
        """Raises if a copy may still read or write shared memory when its CTA has ended."""
        flying = (self._writes >> EPOCH == IN_FLIGHT) & (self._writes & COLUMN_MASK >= self.order.num_threads)
        if flying.any():
            row, word = (int(n) for n in np.argwhere(flying)[0])
            self._ends_early(row, int(self._writes[row, word]), "the copy was issued", "a wait for its mbarrier")
        for column, table in self._agent_reads.items():
            kind, warp, lane = self.order.agent(column)
            if kind != "bulk":
                continue
            for row, stamp in enumerate(table.max(axis=1).tolist()):
                if stamp >> EPOCH > self.order.known_to_any([warp], column, row):
                    issuer = f"warp {warp}, lane {lane} issued it"
                    self._ends_early(
                        row, stamp, issuer, "cp.async.bulk.wait_group.read by that thread before it leaves"
                    )

    def _ends_early(self, row: int, stamp: int, issuer: str, mend: str) -> None:
        raise RaceError(
            f"CTA {self._chunk.cta_name(self._size * row)} ends while a copy may still access its shared memory\n"
            f"  {issuer}, {self._described(stamp >> INSTRUCTION & INSTRUCTION_MASK)}\n"
            f"  mend: {mend}"
        )

    # -- reports

    def _race(self, access: Touch, row: int, word: int, stamp: int, did: str, other: int | None = None) -> RaceError:
        column = stamp & COLUMN_MASK
        if column < self.order.num_threads:
            return self._race_of_threads(access, row, word, stamp, did, other)
        kind, number, lane = self.order.agent(column)
        earlier = self._described(stamp >> INSTRUCTION & INSTRUCTION_MASK)
        at = row if access.rows is None else int(access.rows[row])
        epoch = stamp >> EPOCH
        if kind == "mbarrier":
            name = f"the mbarrier at offset {self._offset(number)}"
            phase = int(self._phases(number)[at]) if epoch == IN_FLIGHT else epoch - AGENT - 1
            state = "a copy to it is in flight" if epoch == IN_FLIGHT else f"a copy to it landed with phase {phase}"
            reason = f"{state} of {name}, and no wait for that phase lies between"
            mend = f"a wait for phase {phase} (parity {phase & 1}) of {name}"
            if self._has_waited(access, row, column, epoch):
                reason, mend = "another lane of this warp has waited for it, but not this one", FOLLOWERS
            return self._report(access, row, word, reason, f"the copy was issued {earlier}", mend)
        if kind == "wgmma":
            who, wait = f"warpgroup {number}", "wgmma.wait_group of its warpgroup"
            warps = list(range(WARPGROUP * number, WARPGROUP * number + WARPGROUP))
            warps = [warp for warp in warps if warp < self.order.num_threads >> 5]
        else:
            who, wait, warps = f"warp {number}, lane {lane}", "cp.async.bulk.wait_group.read of its thread", [number]
        if self.order.known_to_any(warps, column, at) >= epoch:
            reason, mend = f"{who} has waited for what reads it, but no barrier orders that wait before", BARRIER
        else:
            reason, mend = f"{who} may still read it: no {wait} lies between", f"{wait}, then a barrier"
        what = "wgmma" if kind == "wgmma" else "copy"
        return self._report(access, row, word, reason, f"{who} issued the {what} that reads it, {earlier}", mend)
