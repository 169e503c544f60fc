"""Who is ordered after what: the vector clocks of the race detector.

Every warp counts its epochs: its clock ticks whenever it synchronises in any way. What is ordered is told by columns,
one a thread of the CTA and one an agent: what a warp knows of a column is the last epoch of it that all lanes of the
warp are ordered after. Single lanes may know more, if they alone waited. A barrier carries what its arrivals bring to
those that pass it; an arrival brings what the arriving threads did and know, and of the other lanes of their warp only
what these threads know.

Agents do the asynchronous work (PTX ISA 8.9.1.1): the copies that land through an mbarrier, the wgmma of a warpgroup,
the bulk groups of a thread. An agent has no program order. Its epochs are the phases of the mbarrier, or its groups,
and only those who have waited for a phase or a group know of it.

All this has planes; the further ones know less. A copy has to know of what threads did in one of these besides:

    FENCED   epochs that a fence.proxy.async of the thread itself has ended: for what it wrote (PTX ISA 8.6, 9.7.9.25.2)
    CROSSED  epochs with such a fence, by anyone, on the way from the thread to the copy: for what it read (8.9.5)
    USED     epochs whose loads a product had as operands that the thread has waited for: for these loads, instead

and other CTAs, which see a strong write of a thread, in

    PUBLISHED  epochs with a fence of the GPU's scope, by anyone, on the way to that write (8.8; global_memory.py)

While all CTAs of a chunk do the same, they share one row of state; the first that strays gives each CTA its own.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from ..execute.arrays import ALL_LANES, Rows

Where = slice | np.ndarray  # the rows of the state that belong to them

ORDERED, FENCED, CROSSED, USED, PUBLISHED = range(5)  # the planes
AGENT = 1 << 20  # the epochs of agents begin here, above all those of warps
NEVER = 1 << 22  # later than any epoch
_SPARE = 16  # columns that are added at a time


def where_of(rows: Rows) -> Where:
    """The rows of the state that belong to these CTAs: all of it, be it one row, if they are all."""
    return slice(None) if rows is None else rows


class Agent(NamedTuple):
    """Who does asynchronous work: the copies that land through the "mbarrier" at address `number`, the "wgmma" of
    warpgroup `number`, the "bulk" groups of a lane of warp `number`."""

    kind: str
    number: int
    lane: int = 0


class Order:
    """The clocks of the warps of a chunk, of its barriers and of its agents."""

    def __init__(self, num_ctas: int, num_warps: int, num_planes: int = PUBLISHED + 1) -> None:
        self._num_ctas, self._num_warps = num_ctas, num_warps
        self.num_threads = 32 * num_warps
        self._columns: dict[Agent, int] = {}
        self.clock = np.ones((1, num_warps), np.int64)
        # Stamps of epochs below these are of threads that a warp knows of, of whichever of them they are.
        self.safe = np.ones((1, num_warps), np.int64)
        self._known = np.zeros((1, num_warps, num_planes, self.num_threads), np.int64)
        self._lanes: dict[Hashable, np.ndarray] = {}  # by warp: (rows, 32, planes, columns), single lanes' besides
        self._own = np.zeros((1, num_warps, num_planes - 1, 32), np.int64)  # of threads, in the planes after the first
        self._brought: dict[Hashable, np.ndarray] = {}  # by barrier: (rows, planes, columns)
        self._ended: dict[Hashable, np.ndarray] = {}  # the same, of the phases of an mbarrier that are over

    @property
    def num_rows(self) -> int:
        """Rows of the state: one as long as all CTAs do the same."""
        return len(self.clock)

    def part(self) -> None:
        """Gives each CTA its own row of the state."""
        for name in ("clock", "safe", "_known", "_own"):
            setattr(self, name, np.repeat(getattr(self, name), self._num_ctas, axis=0))
        for table in (self._lanes, self._brought, self._ended):
            for key, state in table.items():
                table[key] = np.repeat(state, self._num_ctas, axis=0)

    def column(self, agent: Agent) -> int:
        """The column of an agent."""
        if agent not in self._columns:
            column = self._columns[agent] = self.num_threads + len(self._columns)
            if column == self._known.shape[-1]:
                self._known = _widened(self._known)
                for table in (self._lanes, self._brought, self._ended):
                    for key, state in table.items():
                        table[key] = _widened(state)
        return self._columns[agent]

    def agent(self, column: int) -> Agent:
        """The agent of a column."""
        return list(self._columns)[column - self.num_threads]

    # -- what is known

    def known(self, warp: int, rows: Rows, columns: np.ndarray, lanes: np.ndarray | None, plane: int) -> np.ndarray:
        """The last epochs that lanes of a warp are ordered after.

        Args:
            columns: (rows, ..., n) of whom.
            lanes: (n) or (1), the lane that asks; None: what all lanes know, each but for its own column.
        """
        where = where_of(rows)
        base = self._known[where, warp, plane]
        row = np.arange(len(base)).reshape(-1, *[1] * (columns.ndim - 1))
        found = base[row, columns]
        if warp in self._lanes:
            besides = self._lanes[warp][where, :, plane]
            if lanes is None:
                own = np.zeros((32, besides.shape[-1]), bool)
                own[ALL_LANES, 32 * warp + ALL_LANES] = True
                found = np.maximum(found, np.where(own, NEVER, besides).min(axis=1)[row, columns])
            else:
                found = np.maximum(found, besides[row, lanes, columns])
        return np.asarray(found)

    def known_of_warps(self, warp: int, rows: Rows, lanes: np.ndarray | None, plane: int = ORDERED) -> np.ndarray:
        """The last epoch of any thread of each warp that lanes of a warp are ordered after, (rows, warps, n or 1)."""
        where, shape = where_of(rows), (self._num_warps, 32)
        base = self._known[where, warp, plane, : self.num_threads]
        found = base.reshape(-1, *shape).max(axis=-1)[:, :, None]
        if warp in self._lanes:
            besides = self._lanes[warp][where, :, plane, : self.num_threads]
            most = besides.reshape(-1, 32, *shape).max(axis=-1)  # (rows, lanes, warps)
            least = most.min(axis=1)[:, :, None] if lanes is None else most[:, lanes].transpose(0, 2, 1)
            found = np.maximum(found, least)
        return np.asarray(found)

    def known_of_itself(self, warp: int, rows: Rows, lanes: np.ndarray, plane: int) -> np.ndarray:
        """The last epoch of its own that each of these threads knows of in a plane after the first, (rows, n)."""
        return np.asarray(self._own[where_of(rows), warp, plane - 1][:, lanes])

    # -- within a warp

    def sync_warp(self, warp: int, rows: Rows) -> None:
        """A warp's lanes see each other's earlier accesses."""
        where, own = where_of(rows), slice(32 * warp, 32 * warp + 32)
        known = self._known[where, warp]
        known[:, ORDERED, own] = self.clock[where, warp][:, None]
        np.maximum(known[:, FENCED:, own], self._own[where, warp], out=known[:, FENCED:, own])
        if warp in self._lanes:
            known = np.maximum(known, self._lanes[warp][where].max(axis=1))
            if rows is None:
                del self._lanes[warp]
            else:
                self._lanes[warp][where] = 0
        self._known[where, warp] = known
        self.clock[where, warp] += 1

    def sync_lanes(self, warp: int, lanes: np.ndarray, rows: Rows) -> None:
        """These lanes, (rows, 32), alone see each other's earlier accesses, and what each of them has seen."""
        where, own = where_of(rows), slice(32 * warp, 32 * warp + 32)
        besides = self._besides(warp)[where]
        together = np.where(lanes[:, :, None, None], besides, 0).max(axis=1)
        together[:, ORDERED, own] = np.where(lanes, self.clock[where, warp][:, None], together[:, ORDERED, own])
        own_epochs = np.where(lanes[:, None], self._own[where, warp], 0)
        np.maximum(together[:, FENCED:, own], own_epochs, out=together[:, FENCED:, own])
        self._lanes[warp][where] = np.where(lanes[:, :, None, None], together[:, None], besides)
        self.clock[where, warp] += 1

    def _besides(self, warp: int) -> np.ndarray:
        if warp not in self._lanes:
            self._lanes[warp] = np.zeros((self.num_rows, 32, *self._known.shape[2:]), np.int64)
        return self._lanes[warp]

    def fence(self, warp: int, lanes: np.ndarray | None, rows: Rows, of_proxies: bool, is_wide: bool = False) -> None:
        """A fence of a warp's lanes (None: all): it ends an epoch. `is_wide`: its scope is the GPU or more."""
        where, num_planes = where_of(rows), self._known.shape[2]
        for plane, is_meant in ((FENCED, of_proxies), (CROSSED, of_proxies), (PUBLISHED, is_wide)):
            if is_meant and plane < num_planes:
                now, own = self.clock[where, warp][:, None], self._own[where, warp, plane - 1]
                self._own[where, warp, plane - 1] = now if lanes is None else np.where(lanes, now, own)
                if plane != FENCED:
                    self._cross(warp, lanes, where, plane)
        self.clock[where, warp] += 1

    def _cross(self, warp: int, lanes: np.ndarray | None, where: Where, plane: int) -> None:
        """A fence lies behind all that these lanes (None: all) are ordered after."""
        ordered, crossed = self._known[where, warp, ORDERED], self._known[where, warp, plane]
        if lanes is None:
            self._known[where, warp, plane] = np.maximum(crossed, ordered)
        if lanes is not None or warp in self._lanes:
            besides = self._besides(warp)[where]
            new = np.maximum(np.maximum(besides[:, :, ORDERED], ordered[:, None]), besides[:, :, plane])
            chosen = True if lanes is None else lanes[:, :, None]
            besides[:, :, plane] = np.where(chosen, new, besides[:, :, plane])
            self._lanes[warp][where] = besides

    def vector(self, warp: int, row: int, lane: int, plane: int) -> np.ndarray:
        """What a thread knows of all threads in a plane, (threads); of itself, its own epoch."""
        found = self._known[row, warp, plane, : self.num_threads].copy()
        if warp in self._lanes:
            np.maximum(found, self._lanes[warp][row, lane, plane, : self.num_threads], out=found)
        own = self.clock[row, warp] if plane == ORDERED else self._own[row, warp, plane - 1, lane]
        found[32 * warp + lane] = max(found[32 * warp + lane], own)
        return found

    def has_published(self, warp: int) -> bool:
        """Whether a warp knows of any fence of the GPU's scope."""
        if self._known.shape[2] <= PUBLISHED:
            return False
        known = self._known[:, warp, PUBLISHED].any() or self._own[:, warp, PUBLISHED - 1].any()
        return bool(known or (warp in self._lanes and self._lanes[warp][:, :, PUBLISHED].any()))

    def tick(self, warp: int, rows: Rows) -> None:
        """Ends an epoch of a warp."""
        self.clock[where_of(rows), warp] += 1

    def use(self, warp: int, epochs: np.ndarray, rows: Rows) -> None:
        """A warp has waited for products whose operands were loaded in epochs up to these (rows). It ends an epoch."""
        where = where_of(rows)
        own = self._own[where, warp, USED - 1]
        self._own[where, warp, USED - 1] = np.maximum(own, epochs[:, None])
        self.clock[where, warp] += 1

    # -- barriers

    def arrive(
        self, barrier: Hashable, warp: int, lanes: np.ndarray | None, rows: Rows, only_agents: bool = False
    ) -> None:
        """What lanes of a warp (None: all) did and know becomes known to those that pass the barrier; or only of what
        agents did."""
        where, own = where_of(rows), slice(32 * warp, 32 * warp + 32)
        brought = self._known[where, warp].copy()
        now, further = self.clock[where, warp][:, None], self._own[where, warp]
        if lanes is None:
            brought[:, ORDERED, own] = now
        else:
            brought[:, ORDERED, own] = np.where(lanes, now, brought[:, ORDERED, own])
            further = np.where(lanes[:, None], further, 0)
        np.maximum(brought[:, FENCED:, own], further, out=brought[:, FENCED:, own])
        if warp in self._lanes:
            besides = self._lanes[warp][where]
            chosen = besides if lanes is None else np.where(lanes[:, :, None, None], besides, 0)
            brought = np.maximum(brought, chosen.max(axis=1))
        if only_agents:
            brought[:, :, : self.num_threads] = 0
        clock = self._clock_of(self._brought, barrier)
        clock[where] = np.maximum(clock[where], brought)
        self.clock[where, warp] += 1

    def _clock_of(self, table: dict[Hashable, np.ndarray], barrier: Hashable) -> np.ndarray:
        if barrier not in table:
            table[barrier] = np.zeros((self.num_rows, *self._known.shape[2:]), np.int64)
        return table[barrier]

    def leave(self, barrier: Hashable, warps: Sequence[int], rows: Rows) -> None:
        """A barrier opens for warps that wait at it. All go on in one new epoch, later than any that was brought."""
        where = where_of(rows)
        clock = self._clock_of(self._brought, barrier)[where].copy()
        top = clock[:, ORDERED, : self.num_threads].max(axis=1)
        for warp in warps:
            clock[:, ORDERED, 32 * warp : 32 * warp + 32] = top[:, None]
        for warp in warps:
            known = np.maximum(self._known[where, warp], clock)
            self._known[where, warp] = known
            self.clock[where, warp] = top + 1
            self.safe[where, warp] = known[:, ORDERED, : self.num_threads].min(axis=1) + 1

    def end_phase(self, barrier: Agent, epochs: np.ndarray, rows: Rows) -> None:
        """A phase of an mbarrier is over: what its arrivals brought waits for those who see that, and so does what
        landed through it, the epoch `epochs` (rows) of its own column."""
        where, column = where_of(rows), self.column(barrier)
        ended = self._clock_of(self._ended, barrier)
        ended[where] = np.maximum(ended[where], self._clock_of(self._brought, barrier)[where])
        ended[where, ORDERED, column] = epochs

    def pass_phase(self, barrier: Hashable, warp: int, lanes: np.ndarray | None, rows: Rows) -> None:
        """Lanes of a warp (None: all) have seen that the last phase of an mbarrier is over."""
        where, ended = where_of(rows), self._clock_of(self._ended, barrier)
        if lanes is None:
            self._known[where, warp] = np.maximum(self._known[where, warp], ended[where])
        else:
            besides = self._besides(warp)[where]
            new = np.maximum(besides, ended[where][:, None])
            self._lanes[warp][where] = np.where(lanes[:, :, None, None], new, besides)

    def learn(self, warp: int, column: int, epochs: np.ndarray, lane: int | None, rows: Rows) -> None:
        """A warp, or one lane of it, has waited for an agent's work of epoch `epochs` (rows)."""
        where = where_of(rows)
        if lane is None:
            self._known[where, warp, ORDERED, column] = np.maximum(self._known[where, warp, ORDERED, column], epochs)
        else:
            besides = self._besides(warp)
            besides[where, lane, ORDERED, column] = np.maximum(besides[where, lane, ORDERED, column], epochs)

    def all_know(self, threads: np.ndarray, epochs: np.ndarray) -> bool:
        """Whether all warps are ordered after an epoch of a thread, one of both a row."""
        known = np.take_along_axis(self._known[:, :, ORDERED], threads[:, None, None], axis=2)[:, :, 0]
        return bool((known >= epochs[:, None]).all())

    def known_to_any(self, warps: Sequence[int], column: int, row: int) -> int:
        """The last epoch of a column that any lane of these warps knows of."""
        row = min(row, self.num_rows - 1)
        found = [int(self._known[row, warp, ORDERED, column]) for warp in warps]
        found += [int(self._lanes[warp][row, :, ORDERED, column].max()) for warp in warps if warp in self._lanes]
        return max(found)


def _widened(state: np.ndarray) -> np.ndarray:
    """The same state with more columns."""
    return np.concatenate([state, np.zeros((*state.shape[:-1], _SPARE), np.int64)], axis=-1)
