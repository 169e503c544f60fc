"""What clusters may not touch before an earlier grid, which may still write it, has ended (PTX ISA 9.7.13.13).

Of CTAs in no cluster global_memory.py tells it along with the races between them.
"""

from collections.abc import Mapping

import numpy as np

from ..errors import RaceError
from ..execute.arrays import Mask, lanes_of
from ..execute.chunk import Chunk
from ..execute.machine import Machine
from ..execute.watcher import Actor
from .order import ORDERED, Order

MEND = "griddepcontrol.wait before, then a barrier"


def reason(machine: Machine, writer: str) -> str:
    """Why an access is too early."""
    return f"{writer}, before which {machine.program.kernel.name} may begin, may still write it"


class EarlierGrid:
    """Who in the clusters of a chunk knows that earlier grids have ended. Warps are those of `order`, rows clusters."""

    def __init__(self, chunk: Chunk, prior: Mapping[str, str], order: Order, num_warps: int) -> None:
        """`prior`: see launch.run; `num_warps` are those of a rank."""
        self._chunk, self._prior, self._order, self._num_warps = chunk, prior, order, num_warps
        self._num_clusters = len(chunk.cta_ids) // chunk.cluster.size
        self._waits: dict[int, list[tuple[np.ndarray, int]]] = {}  # by cluster: threads, and their epoch
        self._know: set[tuple[int, int, int]] = set()  # cluster, warp, lane

    def ended(self, warp: Actor, mask: Mask) -> None:
        """griddepcontrol.wait by lanes of a warp."""
        if not self._prior:
            return
        lanes, rows = lanes_of(mask, warp.live)
        for n, row in enumerate(range(self._num_clusters) if rows is None else rows.tolist()):
            waiting = np.arange(32) if lanes is None else np.nonzero(lanes[n if len(lanes) > 1 else 0])[0]
            epoch = int(self._order.clock[self._row(row), warp.index])
            self._waits.setdefault(row, []).append((32 * warp.index + waiting, epoch))

    def access(self, warp: Actor, index: int, addresses: np.ndarray, active: np.ndarray, does: str) -> None:
        """Lanes of a warp access global memory, where `active` says; both are (clusters, 32)."""
        memory = self._chunk.machine.memory
        for row, lane in np.argwhere(active).tolist() if self._prior else ():
            who, address = (row, warp.index, lane), int(addresses[row, lane])
            if who in self._know:
                continue
            tensor = memory.find(address, address)
            if tensor is None or tensor.name not in self._prior:
                continue
            if not self._knows(*who):
                raise self._too_early(who, index, address, self._prior[tensor.name], does)
            self._know.add(who)

    def _knows(self, row: int, warp: int, lane: int) -> bool:
        """Whether a thread is ordered after one that has waited."""
        vector = self._order.vector(warp, self._row(row), lane, ORDERED)
        return any((vector[threads] >= epoch).any() for threads, epoch in self._waits.get(row, ()))

    def _row(self, row: int) -> int:
        """The row of the order's state that belongs to a cluster."""
        return row if self._order.num_rows > 1 else 0

    def _too_early(self, who: tuple[int, int, int], index: int, address: int, writer: str, does: str) -> RaceError:
        row, (rank, warp), lane = who[0], divmod(who[1], self._num_warps), who[2]
        machine, cta = self._chunk.machine, self._chunk.cta_name(row * self._chunk.cluster.size + rank)
        return RaceError(
            f"race on global memory: {machine.memory.describe(address)}: {reason(machine, writer)}\n"
            f"  CTA {cta}, warp {warp}, lane {lane} {does}, {machine.program.kernel.instructions[index].described()}\n"
            f"  mend: {MEND}"
        )
