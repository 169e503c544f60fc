"""Which mbarriers lanes name: one in each CTA, the own or another one of the cluster; and what each of them holds."""

from collections.abc import Iterator

import numpy as np

from ..errors import SynchronisationError
from .arrays import Array, Mask, has_lanes, lanes_of
from .chunk import Chunk, Warp
from .cluster import RANK_BITS
from .shared import WINDOW
from .spaces import resolve
from .watcher import Access, Watcher

_ALL = np.ones((1, 32), bool)


class Mbarrier:
    """The mbarriers at one address, one in every CTA of the chunk: arrays of one element a CTA.

    Attributes:
        index: the instruction that initialised it last; -1: none.
        valid: whether it has been initialised, and not been invalidated since.
        phase: how many phases are over.
        expected, pending: arrivals that a phase awaits, and those that the present one still does.
        tx: bytes that the present phase still awaits.
        seen: whether anyone has seen the end of the last phase.
    """

    def __init__(self, address: int, num_ctas: int) -> None:
        self.address, self.index = address, -1
        self.valid = np.zeros(num_ctas, bool)
        self.phase, self.expected, self.pending, self.tx = (np.zeros(num_ctas, np.int64) for _ in range(4))
        self.seen = np.ones(num_ctas, bool)

    def described(self, row: int) -> str:
        """Its place and what it still awaits in a CTA."""
        state = f"phase {self.phase[row]}: {self.pending[row]} of {self.expected[row]} arrivals pending"
        return f"mbarrier at shared memory offset {self.address - WINDOW} ({state}, {self.tx[row]} bytes to come)"


class MbarrierTable:
    """All mbarriers of a chunk, by address."""

    def __init__(self, chunk: Chunk) -> None:
        self._chunk, self._num_ctas = chunk, len(chunk.cta_ids)
        self._found: dict[int, Mbarrier] = {}

    def _at(self, address: int) -> Mbarrier:
        if address not in self._found:
            self._found[address] = Mbarrier(address, self._num_ctas)
        return self._found[address]

    def _targets(
        self, warp: Warp, index: int, space: str, address: Array, mask: Mask
    ) -> Iterator[tuple[Mbarrier, np.ndarray, np.ndarray | None]]:
        """The barriers that lanes name, and these lanes, (CTAs, 32), each in the row of the CTA that has the barrier;
        for those of other CTAs of the cluster, the rows of the CTAs that name them."""
        if mask is not None and not mask.any():
            return
        if space == "generic":
            space, address = resolve(warp, index, address, mask)
        if space != "shared":
            raise SynchronisationError(f"an mbarrier outside of shared memory\n  {warp.at(index, 0)}")
        for rank, places, active in self._chunk.cluster.by_rank(address, mask):
            for barrier, lanes in self._own_targets(warp, index, places, active):
                yield from self._of_rank(barrier, lanes, rank)

    def _of_rank(
        self, barrier: Mbarrier, lanes: np.ndarray, rank: int
    ) -> Iterator[tuple[Mbarrier, np.ndarray, np.ndarray | None]]:
        """Lanes that name the barrier of a rank (plus 1; 0: of their own CTA), in the rows of the CTAs that have it."""
        cluster = self._chunk.cluster
        for source in range(cluster.size) if rank else ():
            here = lanes & (cluster.ranks == source)[:, None]
            if here.any():
                rows = np.arange(self._num_ctas)
                moved = np.zeros_like(here)
                moved[cluster.rows_of(rows, rank - 1)[cluster.ranks == source]] = here[cluster.ranks == source]
                yield barrier, moved, None if source == rank - 1 else cluster.rows_of(rows, source)
        if not rank:
            yield barrier, lanes, None

    def _own_targets(self, warp: Warp, index: int, address: Array, mask: Mask) -> Iterator[tuple[Mbarrier, np.ndarray]]:
        lanes = _ALL if mask is None else np.broadcast_to(mask, (len(mask), 32))
        if address.size == 1:
            places = [(int(address[0, 0]), lanes)]
        else:
            shape = np.broadcast_shapes(address.shape, lanes.shape)
            each = np.broadcast_to(address, shape)
            places = [(int(place), lanes & (each == place)) for place in np.unique(each[np.broadcast_to(lanes, shape)])]
        for place, chosen in places:
            offset = place - WINDOW
            if offset % 8 or not 0 <= offset <= self._chunk.machine.shared_bytes - 8:
                what = f"an mbarrier at offset {offset} of {self._chunk.machine.shared_bytes} bytes of shared memory"
                self._forbid(warp, index, chosen, has_lanes(chosen), f"{what}: misaligned or out of bounds")
            yield self._at(place), np.broadcast_to(chosen, (self._num_ctas, 32))

    def _valid_targets(
        self, warp: Warp, index: int, space: str, address: Array, mask: Mask
    ) -> Iterator[tuple[Mbarrier, np.ndarray, np.ndarray | None]]:
        for barrier, lanes, source in self._targets(warp, index, space, address, mask):
            if not barrier.valid.all():
                what = f"no mbarrier is initialised at shared memory offset {barrier.address - WINDOW}"
                self._forbid(warp, index, lanes, has_lanes(lanes) & ~barrier.valid, what)
            if watcher := self._chunk.watcher:
                there, who = self._seen_by(barrier, lanes, source)
                active, rows = lanes_of(who, None)
                watcher.mbarrier_used(there, warp, index, _ALL if active is None else active, rows)
            yield barrier, lanes, source

    def _seen_by(self, barrier: Mbarrier, lanes: np.ndarray, source: np.ndarray | None) -> tuple[int, np.ndarray]:
        """The address of a barrier as the CTAs name it that use it, and their lanes."""
        if source is None:
            return barrier.address, lanes
        who = np.zeros_like(lanes)
        used = np.nonzero(has_lanes(lanes))[0]
        who[source[used]] = lanes[used]
        return (int(self._chunk.cluster.ranks[used[0]]) + 1) << RANK_BITS | barrier.address, who

    def _accesses(
        self, warp: Warp, index: int, barrier: Mbarrier, lanes: np.ndarray, does: str
    ) -> Iterator[tuple[Watcher, Access]]:
        """The watcher, if there is one, and the bytes of an mbarrier as accesses of one lane of each CTA."""
        if self._chunk.watcher:
            for pattern, rows in self._chunk.shared.groups(np.full((1, 1), barrier.address), 8, lanes):
                yield self._chunk.watcher, Access(warp, index, pattern, rows, does)

    def _once(self, warp: Warp, index: int, lanes: np.ndarray, what: str) -> None:
        self._forbid(warp, index, lanes, lanes.sum(axis=1) > 1, f"{what} by several lanes at once")

    def _forbid(
        self,
        warp: Warp,
        index: int,
        lanes: np.ndarray,
        wrong: np.ndarray,
        why: str,
        barrier: Mbarrier | None = None,
    ) -> None:
        """Raises if any CTA is wrong."""
        if wrong.any():
            row = int(np.argmax(wrong))
            lane = int(np.argmax(lanes[row if len(lanes) > 1 else 0]))
            state = f": {barrier.described(row)}" if barrier else ""
            raise SynchronisationError(f"wrong use of an mbarrier: {why}{state}\n  {warp.at(index, row, lane)}")
