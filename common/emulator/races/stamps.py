"""Stamps: what a word of shared memory remembers of an access. Tables of the last reads, and of the last atomics."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from ..execute.arrays import Rows
from ..execute.watcher import Access, Actor
from .order import CROSSED, NEVER, ORDERED, USED, Order, Where, where_of

# A stamp, from its low end: column 12 bits, kind of access 4, instruction 24, epoch 23.
KIND, INSTRUCTION, EPOCH = 12, 16, 40
COLUMN_MASK, KIND_MASK, INSTRUCTION_MASK = (1 << 12) - 1, 3, (1 << 24) - 1
# By one thread, by all lanes of a warp together (ldmatrix), by several lanes apart.
PLAIN, COLLECTIVE, SEVERAL = 0, 1, 2


class Touch(Protocol):
    """An access to words of shared memory, alike in CTAs `rows`: an Access or an AgentAccess.

    Attributes:
        lanes: the lane that asks for each word, (n), or for all, (1); None: the warp as a whole.
        threads: the thread of the CTA that touches each word; its own accesses need no order.
    """

    @property
    def warp(self) -> Actor: ...
    @property
    def index(self) -> int: ...
    @property
    def rows(self) -> Rows: ...
    @property
    def does(self) -> str: ...
    @property
    def words(self) -> np.ndarray: ...
    @property
    def lanes(self) -> np.ndarray | None: ...
    @property
    def threads(self) -> np.ndarray: ...


@dataclass(frozen=True)
class Conflict:
    """An earlier access that one is not ordered after: in which row, of which word (its place among those of the later
    access), the stamp that it left, and whose warp it was."""

    row: int
    word: int
    stamp: int
    warp: int


def put(state: np.ndarray, where: Where, words: np.ndarray, stamps: np.ndarray) -> None:
    """Stamps (rows or 1, words or 1) into state (rows, all words)."""
    if isinstance(where, slice):
        state[:, words] = stamps
    else:
        state[where[:, None], words] = stamps


def taken(state: np.ndarray, where: Where, words: np.ndarray) -> np.ndarray:
    """The stamps of words in state (rows, all words) or (rows, warps, all words)."""
    if isinstance(where, slice):
        return state.take(words, axis=-1)
    if state.ndim == 2:
        return state[where[:, None], words]
    return state[where[:, None, None], np.arange(state.shape[1])[:, None], words]


def reaches(stamps: np.ndarray, safe: np.ndarray) -> bool:
    """Whether a stamp of any row (rows, ...) is at or above the row's limit, an epoch."""
    if len(stamps) == 1:
        return bool(stamps.max() >= safe[0] << EPOCH)
    return bool((stamps.reshape(len(stamps), -1).max(axis=1) >= safe << EPOCH).any())


class LastAccesses:
    """The last accesses of one kind (reads, or atomics) of each warp to each word.

    Where only whole warps synchronise, one stamp a warp is enough: that several lanes touched a word in one epoch is a
    kind of its own. Where lanes synchronise apart (`by_lanes`), the words that several lanes of a warp touched, with no
    order between, get a slot, in which the last access of each lane is remembered.
    """

    def __init__(
        self, order: Order, num_warps: int, num_words: int, by_lanes: bool, used: Collection[int] = ()
    ) -> None:
        """`used`: the instructions that load what becomes operands of products, see used_loads.py."""
        self._order, self._num_warps, self._num_words = order, num_warps, num_words
        self._used = np.array(sorted(used), np.int64)
        self._table: np.ndarray | None = None  # (rows, warps, words)
        self._noted = np.zeros(num_words, bool)  # the words that have been accessed at all
        self._slots = np.full(num_words, -1) if by_lanes else None  # the slot of each word; -1: none
        self._num_slots = 0
        self._by_lane = np.zeros((1, num_warps, 0, 32), np.int64)  # (rows, warps, slots and unused room, lanes)

    def part(self, num_ctas: int) -> None:
        """Gives each CTA its own row."""
        if self._table is not None:
            self._table = np.repeat(self._table, num_ctas, axis=0)
            self._by_lane = np.repeat(self._by_lane, num_ctas, axis=0)

    def clear(self, rows: Rows, words: np.ndarray) -> None:
        """Forgets the accesses to words that have been overwritten since, by one who was ordered after them."""
        if self._table is None:
            return
        if rows is None:
            self._table[:, :, words] = 0
        else:
            self._table[rows[:, None, None], np.arange(self._num_warps)[:, None], words] = 0
        if self._slots is not None:
            slots = self._slots[words]
            slots = slots[slots >= 0]
            for row in range(len(self._by_lane)) if rows is None else rows:
                self._by_lane[row][:, slots] = 0

    # -- noting

    def note(self, access: Access) -> None:
        """Remembers an access as the last of its warp."""
        if self._table is None:
            self._table = np.zeros((self._order.num_rows, self._num_warps, self._num_words), np.int64)
            self._by_lane = np.zeros((self._order.num_rows, self._num_warps, 0, 32), np.int64)
        where, words, warp = where_of(access.rows), access.words, access.warp.index
        self._noted[words] = True
        now = (self._order.clock[where, warp] << EPOCH)[:, None] | access.index << INSTRUCTION
        own = self._table[:, warp]
        before = taken(own, where, words)
        if self._slots is not None:
            self._note_lanes(access, before, now)
        if access.collective:
            put(own, where, words, now | COLLECTIVE << KIND)
            return
        others = (before >> EPOCH == now >> EPOCH) & (before & COLUMN_MASK != access.threads)
        kind = np.where(others | access.pattern.repeated, SEVERAL << KIND, 0)
        put(own, where, words, now | access.threads | kind)

    def _note_lanes(self, access: Access, before: np.ndarray, now: np.ndarray) -> None:
        """Gives slots to words that several lanes of the warp touched without an order, and notes the lanes there."""
        assert self._slots is not None
        words, warp = access.words, access.warp.index
        column, plain = before & COLUMN_MASK, (before > 0) & (before >> KIND & KIND_MASK != COLLECTIVE)
        apart = plain & ((column != access.threads) | access.collective)
        if apart.any():
            known = self._order.known(warp, access.rows, column, access.lanes, ORDERED)
            apart &= before >> EPOCH > known
        wanted = apart.any(axis=0) if access.collective else apart.any(axis=0) | access.pattern.repeated
        new = np.unique(words[wanted & (self._slots[words] < 0)])
        if len(new):
            self._add_slots(new)
        slots = self._slots[words]
        if access.collective or not (slots >= 0).any():
            return
        chosen = slots >= 0
        lanes = access.threads[chosen] & 31
        flat = self._by_lane[:, warp].reshape(len(self._by_lane), -1)
        places = slots[chosen] * 32 + lanes
        put(flat, where_of(access.rows), places, now | access.threads[chosen])

    def _add_slots(self, words: np.ndarray) -> None:
        """New slots, which begin with what the table knows of these words."""
        assert self._slots is not None
        assert self._table is not None
        first, end = self._num_slots, self._num_slots + len(words)
        self._num_slots = end
        self._slots[words] = np.arange(first, end)
        stamps = self._table[:, :, words]  # (rows, warps, words)
        plain = (stamps > 0) & (stamps >> KIND & KIND_MASK == PLAIN)
        lane = np.where(plain, stamps & 31, -1)
        if (held := self._by_lane.shape[2]) < end:
            larger = np.zeros((*self._by_lane.shape[:2], max(end, 2 * held), 32), np.int64)
            larger[:, :, :first] = self._by_lane[:, :, :first]
            self._by_lane = larger
        self._by_lane[:, :, first:end] = np.where(lane[..., None] == np.arange(32), stamps[..., None], 0)

    # -- checking

    def first_unordered(self, access: Touch) -> Conflict | None:
        """An access to one of the words that a later one is not ordered after, if there is any."""
        words, lanes, threads = access.words, access.lanes, access.threads
        if self._table is None or not self._noted[words].any():
            return None
        where, warp = where_of(access.rows), access.warp.index
        stamps = taken(self._table, where, words)
        if not reaches(stamps, self._order.safe[where, warp]):
            return None
        kind, column = stamps >> KIND & KIND_MASK, stamps & COLUMN_MASK
        known, together = self._known(access, stamps, ORDERED), kind == COLLECTIVE
        bad = stamps >> EPOCH > known
        own = (kind[:, warp] == SEVERAL) | (column[:, warp] != threads) if lanes is not None else True
        bad[:, warp] &= ~together[:, warp] & own
        if self._slots is not None:
            slots = self._slots[words]
            bad &= (slots < 0) | together
            if (slots >= 0).any() and (found := self._among_lanes(access, slots, ORDERED)):
                return found
        return _first(bad, stamps)

    def first_uncrossed(self, access: Touch) -> Conflict | None:
        """An access to one of the words, between which and a copy's no fence of the proxies lies, if there is any. All
        are ordered before the copy. Those of the issuing thread need a fence too."""
        if self._table is None or not self._noted[access.words].any():
            return None
        stamps = taken(self._table, where_of(access.rows), access.words)
        bad = stamps >> EPOCH > self._crossed(stamps, partial(self._known, access, stamps))
        if self._slots is not None:
            slots = self._slots[access.words]
            bad &= (slots < 0) | (stamps >> KIND & KIND_MASK == COLLECTIVE)
            if (slots >= 0).any() and (found := self._among_lanes(access, slots, CROSSED)):
                return found
        return _first(bad, stamps)

    def _known(self, access: Touch, stamps: np.ndarray, plane: int) -> np.ndarray:
        """The last epochs that an access knows of in a plane, of those who left stamps (rows, warps, words)."""
        column, together = stamps & COLUMN_MASK, stamps >> KIND & KIND_MASK == COLLECTIVE
        warp, rows, lanes = access.warp.index, access.rows, access.lanes
        known = self._order.known(warp, rows, column, lanes, plane)
        if together.any():  # complete for all lanes when any of them goes on
            known = np.where(together, self._order.known_of_warps(warp, rows, lanes, plane), known)
        if plane != ORDERED and lanes is not None:
            own = self._order.known_of_itself(warp, rows, lanes, plane)
            mine = together[:, warp] | (column[:, warp] == access.threads)
            known[:, warp] = np.where(mine, np.maximum(known[:, warp], own), known[:, warp])
        return known

    def _crossed(self, stamps: np.ndarray, known_in: Callable[[int], np.ndarray]) -> np.ndarray:
        """The last epochs behind which a copy may overwrite what was read, by what is known in a plane."""
        known = known_in(CROSSED)
        used = np.isin(stamps >> INSTRUCTION & INSTRUCTION_MASK, self._used) if len(self._used) else np.zeros(1, bool)
        return np.where(used, np.maximum(known, known_in(USED)), known) if used.any() else known

    def _among_lanes(self, access: Touch, slots: np.ndarray, plane: int) -> Conflict | None:
        where, chosen = where_of(access.rows), np.nonzero(slots >= 0)[0]
        stamps = self._by_lane[where].take(slots[chosen], axis=2).swapaxes(2, 3)
        stamps = stamps.reshape(len(stamps), -1, len(chosen))  # (rows, threads, words)
        known_in = partial(self._known_to, access, chosen, stamps)
        bad = stamps >> EPOCH > (known_in(ORDERED) if plane == ORDERED else self._crossed(stamps, known_in))
        if not bad.any():
            return None
        row, thread, word = (int(n) for n in np.argwhere(bad)[0])
        return Conflict(row, int(chosen[word]), int(stamps[row, thread, word]), thread >> 5)

    def _known_to(self, access: Touch, chosen: np.ndarray, stamps: np.ndarray, plane: int) -> np.ndarray:
        """The last epochs that an access to chosen words knows of in a plane, of all threads, its own too."""
        lanes, threads = access.lanes, access.threads
        if lanes is not None and len(lanes) > 1:
            lanes, threads = lanes[chosen], threads[chosen]
        column = np.broadcast_to(np.arange(stamps.shape[1])[None, :, None], stamps.shape)
        known = self._order.known(access.warp.index, access.rows, column, lanes, plane)
        if lanes is None:
            return known
        own: np.ndarray | int = NEVER
        if plane != ORDERED:
            own = self._order.known_of_itself(access.warp.index, access.rows, lanes, plane)[:, None]
        return np.where(column == threads, np.maximum(known, own), known)


def _first(bad: np.ndarray, stamps: np.ndarray) -> Conflict | None:
    """The first access that is bad, of stamps (rows, warps, words)."""
    if not bad.any():
        return None
    row, other, word = (int(n) for n in np.argwhere(bad)[0])
    return Conflict(row, word, int(stamps[row, other, word]), other)
