"""Clusters: CTAs that reach each other's shared memory (PTX ISA 2.2.2), and their common barrier (9.7.13.3).

The CTAs of a cluster are consecutive rows of a chunk, by rank. An address of shared::cluster tells the rank of its CTA
above its low bits, as mapa makes it (9.7.9.23); an address of shared::cta says nothing there, and means the own CTA.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .arrays import Array, Mask, every_lane, has_lanes, narrow
from .errors import SynchronisationError, UnsupportedInstructionError
from .gates import Waiting, pass_guard

if TYPE_CHECKING:
    from .scheduler import Chunk
    from .warp import Warp

RANK_BITS = 24  # an address is (rank + 1) << RANK_BITS | the address in the CTA
MOST_CTAS = 16
GridShape = tuple[int, int, int]


def ranks_of(address: Array) -> Array:
    """The rank that each address names, plus 1; 0: the own CTA."""
    return address >> address.dtype.type(RANK_BITS)


def without_rank(address: Array) -> Array:
    """The addresses within their CTA."""
    return address & address.dtype.type((1 << RANK_BITS) - 1)


def ordered_ctas(grid: GridShape, cluster: GridShape) -> np.ndarray:
    """The CTAs of a grid (x fastest), those of a cluster beside each other by rank.

    Raises:
        UnsupportedInstructionError: the grid does not consist of such clusters.
    """
    if any(g % c for g, c in zip(grid, cluster, strict=True)) or np.prod(cluster) > MOST_CTAS:
        raise UnsupportedInstructionError(f"a grid of {grid} CTAs in clusters of {cluster}")
    ids = np.arange(np.prod(grid)).reshape(grid[::-1])
    (gx, gy, gz), (cx, cy, cz) = grid, cluster
    parted = ids.reshape(gz // cz, cz, gy // cy, cy, gx // cx, cx)
    return parted.transpose(0, 2, 4, 1, 3, 5).reshape(-1)


class Cluster:
    """How the rows of a chunk form clusters of a shape."""

    def __init__(self, shape: GridShape, num_ctas: int) -> None:
        self.shape, self.size = shape, int(np.prod(shape))
        self.ranks = np.arange(num_ctas) % self.size

    def rows_of(self, rows: np.ndarray, rank: int) -> np.ndarray:
        """The rows of the CTAs of a rank in the clusters of these rows."""
        return rows // self.size * self.size + rank

    def by_rank(self, address: Array, mask: Mask) -> Iterator[tuple[int, Array, Mask]]:
        """For each rank (plus 1; 0: the own CTA) that active lanes name: their addresses in the CTA, and the lanes."""
        ranks = ranks_of(address)
        if not ranks.any() and (mask is None or mask.any()):
            yield 0, address, mask
            return
        shape = np.broadcast_shapes(ranks.shape, (1, 32) if mask is None else mask.shape, (1, 32))
        active = np.broadcast_to(True if mask is None else mask, shape)
        named = np.unique(ranks if ranks.size == 1 else np.broadcast_to(ranks, shape)[active]).tolist()
        if max(named, default=0) > self.size:
            raise SynchronisationError(f"an address of rank {named[-1] - 1} in a cluster of {self.size} CTAs")
        if self.size == 1 or ranks.size == 1:
            yield 0 if self.size == 1 else named[0], without_rank(address), mask
            return
        for rank in named:
            chosen = narrow(mask, every_lane(ranks == rank))
            yield rank, without_rank(address), None if chosen.all() else chosen


@dataclass(frozen=True)
class ClusterCall:
    """barrier.cluster.arrive or .wait: a GateCall."""

    index: int
    waits: bool
    releases: bool
    aligned: bool
    guard: Array | None

    def enter(self, chunk: "Chunk", warp: "Warp", mask: Mask, block: int) -> None:
        """See GateCall."""
        mask = pass_guard(warp, mask, self.guard, block + 1)
        if mask is not None and not mask.any():
            return
        if self.aligned and mask is not None:
            live = np.ones((1, 1), bool) if warp.live is None else warp.live
            warp.require(self.index, live, mask, "a barrier for whole warps")
        gate = chunk.gates.setdefault("cluster", ClusterBarrier(chunk))
        assert isinstance(gate, ClusterBarrier)
        if self.waits:
            gate.wait(warp, self.index, mask, block)
        else:
            gate.arrive(warp, self.index, mask, self.releases)
            warp.send(block + 1, mask)


@dataclass(frozen=True, kw_only=True)
class PhaseOfCluster(Waiting):
    """Lanes that wait for the end of phase `phase` (one number a CTA)."""

    phase: np.ndarray


class ClusterBarrier:
    """The barrier of each cluster: a phase is over when all threads that have not left have arrived."""

    def __init__(self, chunk: "Chunk") -> None:
        self.waiting: list[PhaseOfCluster] = []
        self._chunk, self._size = chunk, chunk.cluster.size
        count = len(chunk.cta_ids)
        self._phase = np.zeros(count, np.int64)
        self._arrived = np.zeros((count, len(chunk.warps), 32), bool)
        self._mine = np.full((count, len(chunk.warps), 32), -1)  # the phase in which each thread arrived last

    def arrive(self, warp: "Warp", index: int, mask: Mask, releases: bool) -> None:
        """barrier.cluster.arrive."""
        lanes = np.broadcast_to(True if mask is None else mask, (len(self._phase), 32))
        if (again := lanes & self._arrived[:, warp.index]).any():
            row, lane = (int(n) for n in np.argwhere(again)[0])
            raise SynchronisationError(
                f"a second arrival at barrier.cluster before it is over\n  {warp.at(index, row, lane)}"
            )
        self._arrived[:, warp.index] |= lanes
        self._mine[:, warp.index] = np.where(lanes, self._phase[:, None], self._mine[:, warp.index])
        if self._chunk.race:
            self._chunk.race.cluster_arrive(warp, mask, releases)
        self._end()

    def _end(self) -> bool:
        """Ends the phase of each cluster whose threads have all arrived or left."""
        here = self._arrived.copy()
        for warp in self._chunk.warps:
            if warp.live is not None:
                here[:, warp.index] |= ~warp.live
        arrived, full = self._arrived.any(axis=(1, 2)), here.all(axis=(1, 2))
        of_clusters = full.reshape(-1, self._size).all(axis=1) & arrived.reshape(-1, self._size).any(axis=1)
        ended = np.repeat(of_clusters, self._size)
        if ended.any():
            self._phase += ended
            self._arrived[ended] = False
            if self._chunk.race:
                self._chunk.race.cluster_ends(None if ended.all() else np.nonzero(ended)[0])
        return bool(ended.any())

    def wait(self, warp: "Warp", index: int, mask: Mask, block: int) -> None:
        """barrier.cluster.wait."""
        lanes = np.broadcast_to(True if mask is None else mask, (len(self._phase), 32))
        never = lanes & (self._mine[:, warp.index] < 0)
        if never.any():
            row, lane = (int(n) for n in np.argwhere(never)[0])
            raise SynchronisationError(f"barrier.cluster.wait without an arrival\n  {warp.at(index, row, lane)}")
        phase = np.where(lanes, self._mine[:, warp.index], -1).max(axis=1)
        self.waiting.append(PhaseOfCluster(warp, block + 1, mask, phase=phase))

    def open(self, stuck: bool) -> bool:
        """See Gate."""
        ended = self._end()
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            over = self._phase > each.phase
            present = (
                np.ones(len(over), bool)
                if each.mask is None
                else has_lanes(np.broadcast_to(each.mask, (len(over), 32)))
            )
            if not (over & present).any() or not (stuck or (over | ~present).all()):
                self.waiting.append(each)
                continue
            ended = True
            going, staying = each.part(over | ~present), each.part(~over & present)
            if (present & ~over).any() and staying is not None:
                self.waiting.append(staying)
            assert going is not None
            if self._chunk.race:
                self._chunk.race.cluster_passed(each.warp, going.mask)
            going.go_on()
        return ended

    def progress(self, each: Waiting, row: int) -> str:
        """See Gate."""
        first = row // self._size * self._size
        counts = [int(self._arrived[first + rank].sum()) for rank in range(self._size)]
        return f"barrier.cluster (arrived, by rank: {', '.join(map(str, counts))} threads)"
