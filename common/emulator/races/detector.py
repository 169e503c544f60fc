"""The race detector, as execute/ is given it: a Watcher of each chunk."""

import numpy as np

from ..execute.arrays import Array, Mask
from ..execute.chunk import Chunk
from ..execute.tiles import Region
from ..execute.watcher import Actor, Watcher
from .agents import AgentRaces
from .clusters import ClusterRaces
from .global_memory import ChunkOrder, GlobalRaces


class CtaRaces(AgentRaces):
    """A Watcher of CTAs that are in no cluster: those of each on its shared memory, those of all on global memory."""

    def __init__(self, chunk: Chunk, in_global_memory: GlobalRaces) -> None:
        super().__init__(chunk, chunk.machine.num_warps, chunk.machine.num_words)
        self._global, self._here = in_global_memory, ChunkOrder(chunk.cta_ids, self.order)

    def fence(self, kind: str, warp: Actor, mask: Mask) -> None:
        """See Watcher."""
        if kind == "gpu":
            self._global.fence(self._here, warp, mask)
        super().fence(kind, warp, mask)

    def prerequisites_done(self, warp: Actor, mask: Mask) -> None:
        """See Watcher."""
        self._global.prerequisites_done(self._here, warp, mask)

    def global_access(self, warp: Actor, index: int, address: Array, size: int, mask: Mask, does: str) -> None:
        """See Watcher."""
        self._global.access(self._here, warp, index, address, size, mask, does)

    def global_bulk(self, warp: Actor, index: int, lane: int, rows: np.ndarray, region: Region, does: str) -> None:
        """See Watcher."""
        self._global.bulk(self._here, warp, index, lane, rows, region, does)

    def global_sum_begins(self, warp: Actor, index: int, lane: int, rows: np.ndarray, region: Region) -> None:
        """See Watcher."""
        self._global.may_add(self._here, warp, index, lane, rows, region)


def detector(in_global_memory: GlobalRaces, chunk: Chunk) -> Watcher:
    """The watcher of a chunk, of which all share the races in global memory."""
    if chunk.cluster.size == 1:
        return CtaRaces(chunk, in_global_memory)
    return ClusterRaces(chunk, in_global_memory.prior)
