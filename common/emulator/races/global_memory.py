"""Races between CTAs on global memory: data races of the PTX memory model (PTX ISA 8.7.1).

Two accesses to a word, one of them a write, race unless they are in causality order, or both are strong and have scopes
that hold both CTAs. CTAs come into order when one writes a word strongly and another reads it there:

    to publish   st.release or atom.release; or a strong write behind a fence (8.8)
    to learn     ld.acquire or atom.acquire; or a strong load, or an atom, before a fence (8.8, but not a red: 8.11.1)

each with the scope of the GPU. An atomic operation hands on what those before it published (8.9.2). A fence counts
wherever it lies on the way inside of a CTA, also before a barrier: so are CUDA's "memory fence functions" used.

Sums of floats depend on the order of their additions. Where a kernel is to give the same bits each time, additions are
writes as stores are: two of them race too, unless they are in causality order (`ordered_sums`).

Within a CTA order.py tells who is ordered after what. What a CTA's threads have learnt of others is a list of messages,
each with the thread that learnt it and its epoch then: who is ordered after that has it as well. A message is, by CTA,
a vector of the last epochs of its threads.

Not looked at: accesses of threads of one CTA to each other's words in global memory, launches with clusters but for
what an earlier grid may still write (earlier_grid.py), and the proxies of bulk copies in global memory. A copy out of
shared memory writes when its thread has waited for it. Of strong accesses to a word that is accessed weakly besides,
the last one counts; of its readers, the last three CTAs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..errors import RaceError
from ..execute.arrays import Array, Mask, lanes_of
from ..execute.machine import Machine
from ..execute.memory import Tensor
from ..execute.tiles import Region
from ..execute.watcher import Actor
from . import earlier_grid
from .order import NEVER, ORDERED, PUBLISHED, Order
from .strength import WEAK_WRITE, Strength, Strengths, smallest_global_access

Message = dict[int, np.ndarray]  # by CTA: the last epochs of its threads, (threads)

# A stamp, from its low end: lane 5 bits, row of the chunk 20, number of the record from 1 on.
_ROW, _RECORD = 5, 25
_ROWS = (1 << 20) - 1
_READERS = 3  # CTAs
_PRIOR, _EARLIER_GRID = -1, 1 << _RECORD  # who writes what an earlier grid does, and the stamp of that

FENCE_BEFORE = "__threadfence() before the strong write, or st.release / atom.release with the scope of the GPU"
FENCE_AFTER = "__threadfence() after the strong read, or ld.acquire / atom.acquire with the scope of the GPU"
CHAIN = f"a flag in global memory: the first writes it ({FENCE_BEFORE}), the second waits for it ({FENCE_AFTER})"
SCOPE = "the scope of the GPU for both: .gpu, or atomicAdd() for atomicAdd_block()"


@dataclass(frozen=True)
class Execution:
    """One execution of an instruction by a warp of the CTAs of a chunk: who, where, in which epochs (rows or 1)."""

    index: int
    warp: int
    ctas: np.ndarray
    epochs: np.ndarray
    strength: Strength
    does: str

    def epoch(self, rows: np.ndarray) -> np.ndarray:
        """Of some CTAs."""
        return self.epochs[rows] if len(self.epochs) > 1 else np.broadcast_to(self.epochs, rows.shape)


@dataclass
class Table:
    """What is remembered of a tensor, by word: the stamps of the last weak write and the last strong access, and of the
    last weak reads of _READERS CTAs, with these; and the message of the last strong write."""

    written: np.ndarray
    strong: np.ndarray
    read: np.ndarray  # (_READERS, words), the latest first
    readers: np.ndarray
    messages: dict[int, Message] = field(default_factory=dict)

    def note_reads(self, words: np.ndarray, stamps: np.ndarray, ctas: np.ndarray) -> None:
        """Reads of words by these CTAs. Those of one CTA at a time, as several may read one word."""
        for cta in np.unique(ctas)[-_READERS:].tolist():
            chosen = ctas == cta
            own, left = words[chosen], np.ones(int(chosen.sum()), bool)
            read, readers = stamps[chosen], np.full(len(own), cta)
            for slot in range(_READERS):
                old, whose = self.read[slot, own], self.readers[slot, own]
                self.read[slot, own] = np.where(left, read, old)
                self.readers[slot, own] = np.where(left, readers, whose)
                left = left & (old > 0) & (whose != cta)  # the next slot gets what stood here, of another CTA
                read, readers = old, whose


@dataclass(frozen=True)
class Learnt:
    """A message, and the threads (columns) that have read it, in which epoch."""

    threads: np.ndarray
    epoch: int
    message: Message

    def is_known(self, vectors: np.ndarray) -> np.ndarray:
        """Whether those who are ordered after these epochs of the CTA's threads, (..., threads), have it too."""
        return np.asarray((vectors[..., self.threads] >= self.epoch).any(axis=-1))


@dataclass(frozen=True)
class WordAccess:
    """An access as words, each with its row, its lane and its stamp."""

    order: Order
    record: Execution
    rows: np.ndarray
    lanes: np.ndarray
    words: np.ndarray
    stamps: np.ndarray

    def order_row(self, row: int) -> int:
        """The row of the order's state that belongs to a CTA."""
        return row if self.order.num_rows > 1 else 0

    def epoch(self, row: int) -> int:
        """Of the access, in a CTA."""
        return int(self.record.epochs[row if len(self.record.epochs) > 1 else 0])


class ChunkOrder(NamedTuple):
    """The CTAs of a chunk, and who is ordered after what in each."""

    ctas: np.ndarray
    order: Order


class GlobalRaces:
    """The race detector of a launch's global memory."""

    def __init__(self, machine: Machine, prior: Mapping[str, str], ordered_sums: bool = False) -> None:
        """`prior` and `ordered_sums`: see launch.run."""
        self._machine, self.prior = machine, prior
        self._granule = smallest_global_access(machine.program.kernel.instructions)
        self._strengths = Strengths(machine.program.blocks, ordered_sums)
        self._tables: dict[int, Table] = {}
        prior_grid = Execution(-1, 0, np.array([_PRIOR]), np.zeros(1, np.int64), WEAK_WRITE, "may still write it")
        self._records: list[Execution] = [prior_grid]
        self._seen: dict[int, list[Learnt]] = {}  # by CTA: what strong reads found
        self._learnt: dict[int, list[Learnt]] = {}  # and what of it has been acquired

    # -- what warps do

    def access(
        self, here: ChunkOrder, warp: Actor, index: int, address: Array, size: int, mask: Mask, does: str
    ) -> None:
        """Lanes access global memory; to be called when they have, in the order in which they do."""
        if self._is_watched(int(address.flat[0])):
            shape = (len(here.ctas), 32)
            rows, lanes = np.nonzero(np.broadcast_to(True if mask is None else mask, shape))
            self._enter(here, warp, index, rows, lanes, np.broadcast_to(address, shape)[rows, lanes], size, does)

    def bulk(
        self, here: ChunkOrder, warp: Actor, index: int, lane: int, rows: np.ndarray, region: Region, does: str
    ) -> None:
        """A copy that a lane has issued accesses a region of these CTAs (bool)."""
        addresses, inside, size = region.elements
        if self._is_watched(int(addresses.flat[0])):
            shape, chosen = addresses.shape, np.ones((1, 1), bool) if inside is None else inside
            chosen = np.broadcast_to(chosen, shape)
            of_rows = np.broadcast_to(np.nonzero(rows)[0][:, None], shape)[chosen]
            self._enter(here, warp, index, of_rows, np.full(of_rows.shape, lane), addresses[chosen], size, does)

    def may_add(self, here: ChunkOrder, warp: Actor, index: int, lane: int, rows: np.ndarray, region: Region) -> None:
        """A reduction was issued: it adds between now and the wait for it. That matters where sums are ordered."""
        if self._strengths[index] is WEAK_WRITE:
            self.bulk(here, warp, index, lane, rows, region, "begins to add to it")

    def _is_watched(self, address: int) -> bool:
        """Whether CTAs may meet at an address: not in what is only read."""
        if self._machine.num_ctas == 1 and not self.prior:
            return False
        tensor = self._machine.memory.find(address, address)
        return tensor is not None and (not tensor.readonly or tensor.name in self.prior)

    def _enter(
        self,
        here: ChunkOrder,
        warp: Actor,
        index: int,
        rows: np.ndarray,
        lanes: np.ndarray,
        addresses: np.ndarray,
        size: int,
        does: str,
    ) -> None:
        """One access of each of these threads."""
        tensor = self._machine.memory.find(int(addresses[0]), int(addresses[0])) if len(addresses) else None
        if tensor is None:
            return
        places = (addresses - np.uint64(tensor.base)).astype(np.int64)
        if (elsewhere := (places < 0) | (places >= tensor.size)).any():
            for part in (elsewhere, ~elsewhere):
                self._enter(here, warp, index, rows[part], lanes[part], addresses[part], size, does)
            return
        each = max(1, size // self._granule)
        words = (places[:, None] // self._granule + np.arange(each)).reshape(-1)
        rows, lanes = np.repeat(rows, each), np.repeat(lanes, each)
        kind = self._strengths[index]
        clock = here.order.clock[:, warp.index].copy()
        record = Execution(index, warp.index, here.ctas, clock, kind, does)
        self._records.append(record)
        stamps = len(self._records) << _RECORD | rows << _ROW | lanes
        self._compare(self._table(tensor), WordAccess(here.order, record, rows, lanes, words, stamps), tensor)

    def _table(self, tensor: Tensor) -> Table:
        if tensor.base not in self._tables:
            count = -(-tensor.size // self._granule) + 16
            table = self._tables[tensor.base] = Table(
                *np.zeros((2, count), np.int64), *np.zeros((2, _READERS, count), np.int64)
            )
            if tensor.name in self.prior:
                table.written[:] = _EARLIER_GRID
        return self._tables[tensor.base]

    def _compare(self, table: Table, access: WordAccess, tensor: Tensor) -> None:
        """With what is remembered of the words, and remembers this access."""
        kind, words = access.record.strength, access.words
        earlier = [table.written, table.strong, *(table.read if kind.writes else ())]
        for stamps in (state[words] for state in earlier):
            if stamps.any():
                self._check(tensor, access, stamps, np.arange(len(words)))
        if not (kind.is_strong or kind.writes):
            table.note_reads(words, access.stamps, access.record.ctas[access.rows])
            return
        own = table.strong if kind.is_strong else table.written
        if kind.is_strong:
            self._synchronise(table, access)
        else:
            table.read[:, words] = 0
        own[words] = access.stamps
        if kind.writes and not np.array_equal(kept := own[words], access.stamps):
            self._check(tensor, access, kept, np.arange(len(words)))

    def _synchronise(self, table: Table, access: WordAccess) -> None:
        """What strong accesses of single threads learn and publish, one after the other."""
        kind, order = access.record.strength, access.order
        if not kind.is_wide:
            for word in table.messages.keys() & set(access.words.tolist() if kind.writes else ()):
                del table.messages[word]
            return
        publishes = kind.writes and (kind.releases or order.has_published(access.record.warp))
        if not publishes and not table.messages:
            return
        for at in np.nonzero(np.diff(access.rows * 32 + access.lanes, prepend=-1))[0].tolist():
            word, row, lane = int(access.words[at]), int(access.rows[at]), int(access.lanes[at])
            found, cta = table.messages.get(word), int(access.record.ctas[row])
            if kind.reads and found:
                learnt = Learnt(np.array([32 * access.record.warp + lane]), access.epoch(row), found)
                self._learn(self._learnt if kind.acquires else self._seen, cta, learnt)
            if not kind.writes:
                continue
            own = self._published(access, row, lane, ORDERED if kind.releases else PUBLISHED) if publishes else {}
            merged = _merged(found, own) if found and access.record.does == "updates it" else own
            if merged:
                table.messages[word] = merged
            else:
                table.messages.pop(word, None)
        if publishes:
            order.tick(access.record.warp, None)  # what comes after is not published

    def _published(self, access: WordAccess, row: int, lane: int, plane: int) -> Message:
        """What a thread tells with a write: of its own CTA, and of others, what it has learnt."""
        cta = int(access.record.ctas[row])
        vector = access.order.vector(access.record.warp, access.order_row(row), lane, plane)
        message: Message = {}
        if vector.any():
            message[cta] = vector
            for each in self._learnt.get(cta, ()):
                if each.is_known(vector):
                    message = _merged(message, each.message)
        return message

    def fence(self, here: ChunkOrder, warp: Actor, mask: Mask) -> None:
        """A fence of the GPU's scope, before it has ended its epoch: what strong reads found before it is learnt."""
        if not self._seen:
            return
        order, (lanes, rows) = here.order, lanes_of(mask, warp.live)
        for n, row in enumerate(range(len(here.ctas)) if rows is None else rows.tolist()):
            cta = int(here.ctas[row])
            fencing = np.arange(32) if lanes is None else np.nonzero(lanes[n if len(lanes) > 1 else 0])[0]
            at = row if order.num_rows > 1 else 0
            vectors = [order.vector(warp.index, at, lane, ORDERED) for lane in fencing.tolist()]
            for each in self._seen.get(cta, ()):
                who = [lane for lane, vector in zip(fencing, vectors, strict=True) if each.is_known(vector)]
                if who:
                    learnt = Learnt(32 * warp.index + np.array(who), int(order.clock[at, warp.index]), each.message)
                    self._learn(self._learnt, cta, learnt)

    def prerequisites_done(self, here: ChunkOrder, warp: Actor, mask: Mask) -> None:
        """griddepcontrol.wait by lanes of a warp: all of earlier grids is "performed and made visible" (9.7.13.13)."""
        if not self.prior:
            return
        order, (lanes, rows) = here.order, lanes_of(mask, warp.live)
        for n, row in enumerate(range(len(here.ctas)) if rows is None else rows.tolist()):
            waiting = np.arange(32) if lanes is None else np.nonzero(lanes[n if len(lanes) > 1 else 0])[0]
            epoch = int(order.clock[row if order.num_rows > 1 else 0, warp.index])
            message = {_PRIOR: np.full(order.num_threads, NEVER)}
            self._learn(self._learnt, int(here.ctas[row]), Learnt(32 * warp.index + waiting, epoch, message))

    def _learn(self, table: dict[int, list[Learnt]], cta: int, learnt: Learnt) -> None:
        """Notes what threads of a CTA have found, if they did not know it already."""
        known = table.setdefault(cta, [])
        if not any(
            each.message is learnt.message and np.isin(learnt.threads, each.threads).all() for each in known[-16:]
        ):
            known.append(learnt)

    def known_of(self, access: WordAccess, row: int, lanes: np.ndarray, cta: int) -> np.ndarray:
        """The last epochs of another CTA's threads that lanes are ordered after, (lanes, threads); -1: of none."""
        warp, at = access.record.warp, access.order_row(row)
        vectors = np.stack([access.order.vector(warp, at, lane, ORDERED) for lane in lanes.tolist()])
        found = np.full(vectors.shape, -1)
        for each in self._learnt.get(int(access.record.ctas[row]), ()):
            if cta in each.message:
                known = each.is_known(vectors)
                found[known] = np.maximum(found[known], each.message[cta])
        return found

    def _check(self, tensor: Tensor, access: WordAccess, stamps: np.ndarray, places: np.ndarray) -> None:
        """Raises unless the accesses that left these stamps, each at a place of this access, are ordered before it, or
        may be beside it."""
        for number in np.unique(stamps >> _RECORD).tolist():
            earlier = self.record(number) if number else access.record
            is_written = earlier.strength.writes or access.record.strength.writes
            if not number or not is_written or (earlier.strength.is_wide and access.record.strength.is_wide):
                continue
            at = np.nonzero(stamps >> _RECORD == number)[0]
            theirs = stamps[at] >> _ROW & _ROWS
            is_other = earlier.ctas[theirs] != access.record.ctas[access.rows[places[at]]]
            at, theirs = at[is_other], theirs[is_other]
            if not len(at):
                continue
            threads, epochs = 32 * earlier.warp + (stamps[at] & 31), earlier.epoch(theirs)
            pairs = np.stack([earlier.ctas[theirs], access.rows[places[at]]])
            for pair in np.unique(pairs, axis=1).T:
                these = np.nonzero((pairs == pair[:, None]).all(axis=0))[0]
                lanes, of_lane = np.unique(access.lanes[places[at[these]]], return_inverse=True)
                known = self.known_of(access, int(pair[1]), lanes, int(pair[0]))
                late = epochs[these] > known[of_lane, threads[these]]
                if late.any():
                    found = at[these[int(np.argmax(late))]]
                    raise self.race(tensor, access, int(places[found]), int(stamps[found]))

    def record(self, number: int) -> Execution:
        """By its number in stamps."""
        return self._records[number - 1]

    # -- reports

    def race(self, tensor: Tensor, access: WordAccess, at: int, stamp: int) -> RaceError:
        """Two accesses that are in no order."""
        word = int(access.words[at])
        earlier, kind = self.record(stamp >> _RECORD), access.record.strength
        row, lane = int(access.rows[at]), int(access.lanes[at])
        before, now = int(earlier.ctas[stamp >> _ROW & _ROWS]), int(access.record.ctas[row])
        if before == _PRIOR:
            reason, mend = earlier_grid.reason(self._machine, self.prior[tensor.name]), earlier_grid.MEND
        elif kind.is_strong and earlier.strength.is_strong:
            reason, mend = "both are strong, but the scope of one does not hold both CTAs", SCOPE
        elif any(before in each.message for each in self._learnt.get(now, ())):
            reason = "a flag orders some of what the two CTAs do, but not these accesses"
            mend = "the first before the barrier and fence in front of the flag, the second after those behind it"
        elif any(before in each.message for each in self._seen.get(now, ())):
            reason, mend = "its CTA has read the other's flag, but no acquire lies between", FENCE_AFTER
        else:
            reason, mend = "nothing that the other CTA published orders the two", CHAIN
        described = self._machine.program.kernel.instructions
        who = f"  CTA {self._name(before)}, warp {earlier.warp}, lane {stamp & 31} {earlier.does} before"
        who = "" if before == _PRIOR else f"{who}, {described[earlier.index].described()}\n"
        return RaceError(
            f"race on global memory: {self._machine.memory.describe(tensor.base + word * self._granule)}: {reason}\n"
            f"  CTA {self._name(now)}, warp {access.record.warp}, lane {lane} {access.record.does},"
            f" {described[access.record.index].described()}\n"
            f"{who}  mend: {mend}"
        )

    def _name(self, cta: int) -> str:
        x, y, _ = self._machine.grid
        return f"({cta % x}, {cta // x % y}, {cta // (x * y)})"


def _merged(a: Message, b: Message) -> Message:
    """What both messages tell."""
    if not a or not b:
        return a or b
    merged = dict(a)
    for cta, vector in b.items():
        mine = merged.get(cta)
        merged[cta] = vector if mine is None or mine is vector else np.maximum(mine, vector)
    return merged
