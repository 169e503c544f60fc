"""The common barrier of a cluster's CTAs (PTX ISA 9.7.13.3), a gate."""

from dataclasses import dataclass

import numpy as np

from ..errors import SynchronisationError
from .arrays import Array, Mask, has_lanes
from .chunk import Chunk, Waiting, Warp


@dataclass(frozen=True)
class ClusterCall:
    """barrier.cluster.arrive or .wait: a GateCall."""

    index: int
    waits: bool
    releases: bool
    aligned: bool
    guard: Array | None

    def enter(self, chunk: Chunk, warp: Warp, mask: Mask, block: int) -> None:
        """See GateCall."""
        mask = warp.pass_guard(mask, self.guard, block + 1)
        if mask is not None and not mask.any():
            return
        if self.aligned and mask is not None:
            live = np.ones((1, 1), bool) if warp.live is None else warp.live
            warp.require(self.index, live, mask, "a barrier for whole warps")
        gate = chunk.gate("cluster", lambda: ClusterBarrier(chunk))
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

    def __init__(self, chunk: Chunk) -> None:
        self.waiting: list[PhaseOfCluster] = []
        self._chunk, self._size = chunk, chunk.cluster.size
        count = len(chunk.cta_ids)
        self._phase = np.zeros(count, np.int64)
        self._arrived = np.zeros((count, len(chunk.warps), 32), bool)
        self._mine = np.full((count, len(chunk.warps), 32), -1)  # the phase in which each thread arrived last

    def arrive(self, warp: Warp, index: int, mask: Mask, releases: bool) -> None:
        """barrier.cluster.arrive."""
        lanes = np.broadcast_to(True if mask is None else mask, (len(self._phase), 32))
        if (again := lanes & self._arrived[:, warp.index]).any():
            row, lane = (int(n) for n in np.argwhere(again)[0])
            raise SynchronisationError(
                f"a second arrival at barrier.cluster before it is over\n  {warp.at(index, row, lane)}"
            )
        self._arrived[:, warp.index] |= lanes
        self._mine[:, warp.index] = np.where(lanes, self._phase[:, None], self._mine[:, warp.index])
        if self._chunk.watcher:
            self._chunk.watcher.cluster_arrive(warp, mask, releases)
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
            if self._chunk.watcher:
                self._chunk.watcher.cluster_ends(None if ended.all() else np.nonzero(ended)[0])
        return bool(ended.any())

    def wait(self, warp: Warp, index: int, mask: Mask, block: int) -> None:
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
            if self._chunk.watcher:
                self._chunk.watcher.cluster_passed(each.warp, going.mask)
            going.go_on()
        return ended

    def progress(self, each: Waiting, row: int) -> str:
        """See Gate."""
        first = row // self._size * self._size
        counts = [int(self._arrived[first + rank].sum()) for rank in range(self._size)]
        return f"barrier.cluster (arrived, by rank: {', '.join(map(str, counts))} threads)"
