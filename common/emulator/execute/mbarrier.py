"""Mbarriers (PTX ISA 9.7.13.15): barriers in shared memory, which count arrivals and the bytes of asynchronous copies.

A phase is over when no arrival is pending and all expected bytes have come (9.7.13.15.6). A wait is a gate: a warp that
tests for a phase is put aside until the phase is over, so that `try_wait; @!p bra` is never executed as a spin. A test
may also say no: it does when no warp of the chunk can go on otherwise, or at once where some warps are to lag, and once
only until something has happened.

What PTX leaves undefined is an error here: an object that was not initialised, more arrivals than a phase awaits, a
phase that ends before anyone has seen the end of the last one (9.7.13.15.4), counts out of their range (9.7.13.15.2).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import SynchronisationError
from .arrays import Array, Mask, has_lanes
from .chunk import Chunk, Waiting, Warp
from .cluster import RANK_BITS
from .mbarrier_table import Mbarrier, MbarrierTable

MAX_COUNT = (1 << 20) - 1  # of arrivals and, up and down, of bytes (9.7.13.15.2)


@dataclass(frozen=True)
class MbarrierCall:
    """The operands of test_wait and try_wait: addresses; the parity of the awaited phase, or the state that an arrival
    returned; the guard of the instruction and the slot of the predicate that is written (None: none)."""

    addresses: Array
    phases: Array
    by_parity: bool
    space: str
    guard: Array | None
    target: int | None

    def enter(self, chunk: Chunk, warp: Warp, mask: Mask, block: int) -> None:
        """See GateCall."""
        mask = warp.pass_guard(mask, self.guard, block + 1)
        if mask is None or mask.any():
            mbarriers_of(chunk).wait(warp, mask, block, self)


@dataclass(frozen=True, kw_only=True)
class PhaseWaiting(Waiting):
    """Lanes that wait for the end of phase `phase` (one number a CTA) of an mbarrier. `answered`: how much had happened
    in the chunk when they were last told that it was not over."""

    barrier: Mbarrier
    phase: np.ndarray
    answered: int

    @property
    def over(self) -> np.ndarray:
        """Whether it is over, one bool a CTA."""
        return np.asarray(self.barrier.phase > self.phase)


def mbarriers_of(chunk: Chunk) -> "Mbarriers":
    """Those of a chunk."""
    return chunk.gate("mbarriers", lambda: Mbarriers(chunk))


class Mbarriers(MbarrierTable):
    """All mbarriers of a chunk, and the gate of all those who wait for one."""

    def __init__(self, chunk: Chunk) -> None:
        super().__init__(chunk)
        self.waiting: list[PhaseWaiting] = []
        self._events = 0  # arrivals and copies so far: what may end a phase
        self._told: dict[tuple[int, int], int] = {}  # at how many events a warp was told no, by warp and block

    # -- operations

    def init(self, warp: Warp, index: int, space: str, address: Array, count: Array, mask: Mask) -> None:
        """mbarrier.init (9.7.13.15.9)."""
        for barrier, lanes, _ in self._targets(warp, index, space, address, mask):
            present = has_lanes(lanes)
            self._forbid(warp, index, lanes, present & barrier.valid, "there is one already at this address")
            self._once(warp, index, lanes, "mbarrier.init")
            wanted = _of_row(count, lanes)
            wrong = present & ((wanted < 1) | (wanted > MAX_COUNT))
            self._forbid(warp, index, lanes, wrong, "a count out of 1 .. 2^20 - 1")
            barrier.index = index
            for watcher, access in self._accesses(warp, index, barrier, lanes, "initialises an mbarrier in"):
                watcher.mbarrier_made(barrier.address, access)
            for state, value in (
                (barrier.valid, True), (barrier.seen, True), (barrier.phase, 0), (barrier.tx, 0),
                (barrier.expected, wanted), (barrier.pending, wanted),
            ):  # fmt: skip
                np.copyto(state, value, where=present)

    def inval(self, warp: Warp, index: int, space: str, address: Array, mask: Mask) -> None:
        """mbarrier.inval (9.7.13.15.10)."""
        for barrier, lanes, _ in self._valid_targets(warp, index, space, address, mask):
            self._once(warp, index, lanes, "mbarrier.inval")
            for watcher, access in self._accesses(warp, index, barrier, lanes, "invalidates an mbarrier in"):
                watcher.mbarrier_unmade(barrier.address, access)
            barrier.valid &= ~has_lanes(lanes)

    def expect_tx(self, warp: Warp, index: int, space: str, address: Array, count: Array, mask: Mask) -> None:
        """mbarrier.expect_tx (9.7.13.15.11): the present phase awaits more bytes."""
        for barrier, lanes, source in self._valid_targets(warp, index, space, address, mask):
            self._add_tx(warp, index, barrier, lanes, _moved(count, source), 1)

    def complete_tx_by(self, warp: Warp, index: int, space: str, address: Array, count: Array, mask: Mask) -> None:
        """mbarrier.complete_tx (9.7.13.15.12), executed by threads."""
        for barrier, lanes, source in self._valid_targets(warp, index, space, address, mask):
            self._add_tx(warp, index, barrier, lanes, _moved(count, source), -1)
            self._end_phase(barrier, has_lanes(lanes))

    def arrive(
        self,
        warp: Warp,
        index: int,
        space: str,
        address: Array,
        mask: Mask,
        count: Array | None = None,
        expect: Array | None = None,
        drops: bool = False,
        is_narrow: bool = False,
        may_complete: bool = True,
    ) -> Array:
        """mbarrier.arrive and arrive_drop (9.7.13.15.13, .14).

        Args:
            count: arrivals of each lane; None: one.
            expect: bytes that each lane says to come, before it arrives (.expect_tx).
            drops: later phases await so many arrivals less.
            is_narrow: its scope is the CTA.
            may_complete: False for .noComplete.

        Returns:
            The state before each lane's arrival, u8: the phase, and in its low half the pending arrivals.
        """
        state = np.zeros((self._num_ctas, 32), np.uint64)
        for barrier, lanes, source in self._valid_targets(warp, index, space, address, mask):
            present = has_lanes(lanes)
            if expect is not None:
                self._add_tx(warp, index, barrier, lanes, _moved(expect, source), 1)
            each = np.where(lanes, 1 if count is None else _moved(count, source).astype(np.int64), 0)
            total = each.sum(axis=1)
            too_many = "more arrivals at once than are pending"
            self._forbid(warp, index, lanes, present & (total > barrier.pending), too_many, barrier)
            unseen = "an arrival, though nobody has yet seen the end of the last phase"
            self._forbid(warp, index, lanes, present & ~barrier.seen, unseen, barrier)
            before = barrier.pending[:, None] - (np.cumsum(each, axis=1) - each)
            state = np.where(lanes, (barrier.phase[:, None] << 32 | before).astype(np.uint64), state)
            barrier.pending -= total
            if drops:
                barrier.expected -= total
            if watcher := self._chunk.watcher:
                there, who = self._seen_by(barrier, lanes, source)
                watcher.mbarrier_arrive(there, warp, who, is_narrow and source is not None)
            ended = self._end_phase(barrier, present)
            if not may_complete:
                self._forbid(warp, index, lanes, ended, "an arrival with .noComplete ended the phase")
        return state

    def complete_tx(self, address: int, num_bytes: int, rows: np.ndarray | None) -> None:
        """A copy of these CTAs (None: all) has landed, of `num_bytes` in each, and says so to its mbarrier.

        Raises:
            SynchronisationError: there is no mbarrier, or it has had too many bytes.
        """
        if rank := address >> RANK_BITS:
            rows = self._chunk.cluster.rows_of(np.arange(self._num_ctas) if rows is None else rows, rank - 1)
        barrier = self._at(address & (1 << RANK_BITS) - 1)
        present = np.zeros(self._num_ctas, bool)
        present[slice(None) if rows is None else rows] = True
        wrong = present & (~barrier.valid | (barrier.tx - num_bytes < -MAX_COUNT))
        if wrong.any():
            row = int(np.argmax(wrong))
            what = (
                "too many bytes have come"
                if barrier.valid[row]
                else "it is not initialised, but a copy lands through it"
            )
            raise SynchronisationError(f"{what}: CTA {self._chunk.cta_name(row)}, {barrier.described(row)}")
        barrier.tx -= num_bytes * present
        self._end_phase(barrier, present)

    def phases(self, address: int) -> np.ndarray:
        """How many phases of the mbarriers at an address are over, one number a CTA."""
        return self._at(address).phase

    def check(self, warp: Warp, index: int, address: Array, mask: Mask) -> None:
        """Raises unless the mbarriers of a copy are initialised; called when the copy is issued."""
        for _ in self._valid_targets(warp, index, "shared", address, mask):
            pass

    # -- waits

    def wait(self, warp: Warp, mask: Mask, block: int, call: MbarrierCall) -> None:
        """Lanes test for the end of a phase (9.7.13.15.16)."""
        index = self._chunk.program.blocks[block].last.index
        for barrier, lanes, source in self._valid_targets(warp, index, call.space, call.addresses, mask):
            if source is not None:
                self._forbid(warp, index, lanes, has_lanes(lanes), "a wait for an mbarrier of another CTA")
            phases = np.broadcast_to(call.phases, (self._num_ctas, 32)).astype(np.int64)
            if not call.by_parity:
                phases = phases >> 32
                known = (phases == barrier.phase[:, None]) | (phases == barrier.phase[:, None] - 1)
                old = "the state is of neither the present nor the last phase"
                self._forbid(warp, index, lanes, has_lanes(lanes & ~known), old, barrier)
            elif (lanes & (phases > 1)).any():
                self._forbid(warp, index, lanes, has_lanes(lanes & (phases > 1)), "a parity other than 0 and 1")
            else:
                phases = barrier.phase[:, None] - ((barrier.phase[:, None] & 1) != phases)
            for awaited, chosen in _by_phase(phases, lanes):
                self.waiting.append(
                    PhaseWaiting(
                        warp, block + 1, None if chosen.all() else chosen, call.target,
                        barrier=barrier, phase=awaited, answered=self._told.get((warp.index, block), -1),
                    )
                )  # fmt: skip
        if all(each.warp is not warp or each.over.all() for each in self.waiting):
            self.open(stuck=False)
        elif self._chunk.machine.lagging:
            self.open(stuck=True)
            self.answer_no([warp])

    def open(self, stuck: bool) -> bool:
        """See Gate. CTAs go on together, as long as no warp is stuck for it: the fewer numpy calls, the better."""
        kept: list[PhaseWaiting] = []
        leaving: list[tuple[PhaseWaiting, np.ndarray]] = []
        for each in self.waiting:
            over = each.over
            concerned = np.ones(1, bool) if each.mask is None else has_lanes(each.mask)
            if not (over & concerned).any() or not (stuck or (over | ~concerned).all()):
                kept.append(each)
                continue
            if staying := each.part(~over) if (concerned & ~over).any() else None:
                kept.append(staying)
            leaving.append((each, over))
        self.waiting = kept
        for each, over in leaving:
            going = each.part(over) if not over.all() else each
            assert going is not None
            present = has_lanes(np.broadcast_to(True if going.mask is None else going.mask, (self._num_ctas, 32)))
            each.barrier.seen |= present & (each.phase == each.barrier.phase - 1)
            if watcher := self._chunk.watcher:
                watcher.mbarrier_passed(each.barrier.address, each.warp, going.mask)
            going.go_on(np.ones((1, 1), bool))
        return bool(leaving)

    def answer_no(self, warps: Sequence[Warp]) -> bool:
        """Tells those of these warps who wait that their phase is not over, each once until something has happened;
        whether any was told. A loop comes back, and then waits; other code may do what ends the phase."""

        def is_due(each: PhaseWaiting) -> bool:
            return each.warp in warps and each.answered != self._events

        asked = [each for each in self.waiting if is_due(each)]
        self.waiting = [each for each in self.waiting if not is_due(each)]
        for each in asked:
            self._told[each.warp.index, each.block - 1] = self._events
            each.go_on(np.zeros((1, 1), bool))
        return bool(asked)

    def progress(self, each: Waiting, row: int) -> str:
        """See Gate."""
        assert isinstance(each, PhaseWaiting)
        made = self._chunk.program.kernel.instructions[each.barrier.index].where()
        return f"the end of phase {each.phase[row]} of the {each.barrier.described(row)}, initialised at {made}"

    # -- parts

    def _add_tx(self, warp: Warp, index: int, barrier: Mbarrier, lanes: np.ndarray, count: Array, sign: int) -> None:
        barrier.tx += sign * np.where(lanes, count.astype(np.int64), 0).sum(axis=1)
        self._forbid(warp, index, lanes, np.abs(barrier.tx) > MAX_COUNT, "more than 2^20 - 1 bytes", barrier)

    def _end_phase(self, barrier: Mbarrier, present: np.ndarray) -> np.ndarray:
        """Ends the phase where nothing is left to come; in which CTAs it did."""
        self._events += 1
        ended = present & (barrier.pending == 0) & (barrier.tx == 0)
        if ended.any():
            barrier.phase += ended
            if watcher := self._chunk.watcher:
                watcher.mbarrier_ends(barrier.address, barrier.phase, None if ended.all() else np.nonzero(ended)[0])
            barrier.pending = np.where(ended, barrier.expected, barrier.pending)
            barrier.seen &= ~ended
        return ended


def _moved(values: Array, source: np.ndarray | None) -> Array:
    """What lanes of the CTAs `source` have, in the rows of the CTAs whose barriers they name."""
    return values if source is None or len(values) == 1 else values[source]


def _of_row(values: Array, lanes: np.ndarray) -> np.ndarray:
    """The value of each CTA's first lane."""
    values = np.broadcast_to(values, lanes.shape).astype(np.int64)
    return np.take_along_axis(values, lanes.argmax(axis=1)[:, None], axis=1)[:, 0]


def _by_phase(phases: np.ndarray, lanes: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The phase that each CTA's lanes await, one number a CTA, and these lanes; where lanes differ, in turn."""
    left = lanes
    while left.any():
        first = np.take_along_axis(np.broadcast_to(phases, lanes.shape), left.argmax(axis=1)[:, None], axis=1)
        chosen = left & (phases == first)
        yield first[:, 0], chosen
        left = left & ~chosen
