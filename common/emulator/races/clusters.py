"""The race detector of clusters: one row of its state is a cluster, whose CTAs stand side by side in it.

Everything else tells it of the warps, words and mbarriers of a CTA. Here they become those of the cluster: warp w of
rank r is number r * (warps a CTA) + w, word n of rank r is r * (words a CTA) + n, an mbarrier's address has its rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..execute.arrays import Array, Mask, Rows
from ..execute.chunk import Chunk
from ..execute.cluster import RANK_BITS
from ..execute.tiles import Region
from ..execute.watcher import UNIT, Access, Actor, AgentAccess
from .agents import WARPGROUP, AgentRaces
from .earlier_grid import EarlierGrid


@dataclass(frozen=True)
class RankedWarp:
    """A warp of the CTAs of one rank, by its number in the cluster."""

    index: int
    live: Mask


class ClusterRaces:
    """A Watcher of CTAs in clusters."""

    def __init__(self, chunk: Chunk, prior: Mapping[str, str]) -> None:
        """`prior`: see launch.run."""
        self._chunk, self._size = chunk, chunk.cluster.size
        num_warps, num_words = chunk.machine.num_warps, chunk.machine.num_words
        self._warps = -(-num_warps // WARPGROUP) * WARPGROUP
        self._words = -(-num_words * chunk.machine.granule // UNIT) * UNIT // chunk.machine.granule
        self._all = AgentRaces(chunk, self._warps * self._size, self._words * self._size, self._size)
        self._earlier = EarlierGrid(chunk, prior, self._all.order, self._warps)

    # -- from CTAs to ranks

    def _ranks(self, rows: Rows) -> Iterator[tuple[int, Rows]]:
        """The ranks of these CTAs, and the clusters of each."""
        if rows is None:
            yield from ((rank, None) for rank in range(self._size))
            return
        for rank in range(self._size):
            clusters = rows[rows % self._size == rank] // self._size
            if len(clusters):
                yield rank, None if len(clusters) * self._size == len(self._chunk.cta_ids) else clusters

    def _masks(self, mask: Mask) -> Iterator[tuple[int, Mask]]:
        for rank in range(self._size):
            if mask is None or len(mask) == 1:
                yield rank, mask
            elif (own := mask[rank :: self._size]).any():
                yield rank, own

    def _warp(self, warp: Actor, rank: int) -> RankedWarp:
        live = warp.live if warp.live is None or len(warp.live) == 1 else warp.live[rank :: self._size]
        return RankedWarp(self._warps * rank + warp.index, live)

    def _address(self, address: int, rank: int) -> int:
        """An mbarrier's address with the rank of its CTA, which is `rank` if the address does not say."""
        return address if address >> RANK_BITS else (rank + 1) << RANK_BITS | address

    def _accesses(self, access: Access, at: int | None = None) -> Iterator[Access]:
        """The same access in the CTAs of each rank; to the memory of rank `at`, if not to the own one."""
        for rank, clusters in self._ranks(access.rows):
            words = access.pattern.words + self._words * (rank if at is None else at)
            pattern = replace(access.pattern, words=words)
            yield replace(access, warp=self._warp(access.warp, rank), pattern=pattern, rows=clusters)

    def _agents(self, access: AgentAccess, at: int | None = None) -> Iterator[tuple[int, AgentAccess]]:
        units = self._words * self._chunk.machine.granule // UNIT
        for rank, clusters in self._ranks(access.rows):
            own = access.units + units * (rank if at is None else at)
            yield rank, replace(access, warp=self._warp(access.warp, rank), units=own, rows=clusters)

    # -- order

    def sync_warp(self, warp: int, rows: Rows) -> None:
        for rank, clusters in self._ranks(rows):
            self._all.sync_warp(self._warps * rank + warp, clusters)

    def sync_lanes(self, warp: int, lanes: np.ndarray) -> None:
        for rank, own in self._masks(lanes):
            assert own is not None
            self._all.sync_lanes(self._warps * rank + warp, own)

    def arrive(self, barrier: int, warp: int, rows: Rows) -> None:
        for rank, clusters in self._ranks(rows):
            self._all.arrive(self._of_rank(barrier, rank), self._warps * rank + warp, clusters)

    def leave(self, barrier: int, warps: Sequence[int], rows: Rows) -> None:
        for rank, clusters in self._ranks(rows):
            self._all.leave(self._of_rank(barrier, rank), [self._warps * rank + warp for warp in warps], clusters)

    def _of_rank(self, barrier: int, rank: int) -> int:
        return barrier * self._size + rank

    def fence(self, kind: str, warp: Actor, mask: Mask) -> None:
        for rank, own in self._masks(mask):
            self._all.fence(kind, self._warp(warp, rank), own)

    def prerequisites_done(self, warp: Actor, mask: Mask) -> None:
        """griddepcontrol.wait."""
        for rank, own in self._masks(mask):
            self._earlier.ended(self._warp(warp, rank), own)

    def cluster_arrive(self, warp: Actor, mask: Mask, releases: bool) -> None:
        """barrier.cluster.arrive."""
        for rank, own in self._masks(mask):
            self._all.cluster_arrive(self._warp(warp, rank), own, releases)

    def cluster_ends(self, rows: Rows) -> None:
        """The barrier of these clusters (all their CTAs) is over."""
        self._all.cluster_ends(None if rows is None else np.unique(rows // self._size))

    def cluster_passed(self, warp: Actor, mask: Mask) -> None:
        """barrier.cluster.wait is over."""
        for rank, own in self._masks(mask):
            self._all.cluster_passed(self._warp(warp, rank), own)

    # -- accesses

    def read(self, access: Access, at: int | None = None) -> None:
        for each in self._accesses(access, at):
            self._all.read(each)

    def write(self, access: Access, at: int | None = None) -> None:
        for each in self._accesses(access, at):
            self._all.write(each)

    def atomic(self, access: Access, at: int | None = None) -> None:
        for each in self._accesses(access, at):
            self._all.atomic(each)

    def issue_copy(self, access: Access) -> None:
        for each in self._accesses(access):
            self._all.issue_copy(each)

    def land_copy(self, access: Access) -> None:
        for each in self._accesses(access):
            self._all.land_copy(each)

    def check_agreement(self, access: Access, differs: np.ndarray) -> None:
        self._all.check_agreement(access, differs)

    def global_access(self, warp: Actor, index: int, address: Array, size: int, mask: Mask, does: str) -> None:
        """Of races in the global memory of clusters those with an earlier grid alone are looked for."""
        shape = (len(self._chunk.cta_ids), 32)
        addresses, active = np.broadcast_to(address, shape), np.broadcast_to(True if mask is None else mask, shape)
        for rank in range(self._size):
            own = slice(rank, None, self._size)
            self._earlier.access(self._warp(warp, rank), index, addresses[own], active[own], does)

    def global_sum_begins(self, warp: Actor, index: int, lane: int, rows: np.ndarray, region: Region) -> None:
        """Additions of clusters are in any order."""

    def global_bulk(self, warp: Actor, index: int, lane: int, rows: np.ndarray, region: Region, does: str) -> None:
        """As global_access, of the lane that has issued a copy."""
        elements, some, size = region.elements
        inside = np.broadcast_to(True if some is None else some, elements.shape)
        addresses, active = np.zeros((len(rows), 32), np.uint64), np.zeros((len(rows), 32), bool)
        addresses[rows, lane] = elements[np.arange(len(elements)), inside.argmax(axis=-1)]
        active[rows, lane] = inside.any(axis=-1)
        self.global_access(warp, index, addresses, size, active, does)

    # -- mbarriers

    def mbarrier_made(self, address: int, access: Access) -> None:
        for rank, each in zip(dict(self._ranks(access.rows)), self._accesses(access), strict=True):
            self._all.mbarrier_made(self._address(address, rank), each)

    def mbarrier_unmade(self, address: int, access: Access) -> None:
        for rank, each in zip(dict(self._ranks(access.rows)), self._accesses(access), strict=True):
            self._all.mbarrier_unmade(self._address(address, rank), each)

    def mbarrier_used(self, address: int, warp: Actor, index: int, active: np.ndarray, rows: Rows) -> None:
        full = np.zeros((len(self._chunk.cta_ids), 32), bool)
        full[slice(None) if rows is None else rows] = active
        for rank, own in self._masks(full):
            assert own is not None
            clusters = np.nonzero(own.any(axis=1))[0]
            chosen = None if len(clusters) == len(own) else clusters
            ranked = self._warp(warp, rank)
            self._all.mbarrier_used(self._address(address, rank), ranked, index, own[clusters], chosen)

    def mbarrier_arrive(self, address: int, warp: Actor, mask: Mask, is_narrow: bool = False) -> None:
        for rank, own in self._masks(mask):
            self._all.mbarrier_arrive(self._address(address, rank), self._warp(warp, rank), own, is_narrow)

    def mbarrier_ends(self, address: int, phases: np.ndarray, rows: Rows) -> None:
        for rank, clusters in self._ranks(rows):
            self._all.mbarrier_ends(self._address(address, rank), phases[rank :: self._size], clusters)

    def mbarrier_passed(self, address: int, warp: Actor, mask: Mask) -> None:
        for rank, own in self._masks(mask):
            self._all.mbarrier_passed(self._address(address, rank), self._warp(warp, rank), own)

    # -- agents

    def agent_writes(self, access: AgentAccess, mbarrier: int, at: int | None = None) -> None:
        for rank, each in self._agents(access, at):
            self._all.agent_writes(each, self._address(mbarrier, rank if at is None else at))

    def agent_lands(self, access: AgentAccess, mbarrier: int, at: int | None = None) -> None:
        for rank, each in self._agents(access, at):
            self._all.agent_lands(each, self._address(mbarrier, rank if at is None else at))

    def wgmma_reads(self, access: AgentAccess) -> None:
        for _, each in self._agents(access):
            self._all.wgmma_reads(each)

    def wgmma_starts(self, warp: Actor, products: Sequence[int], rows: Rows) -> None:
        for rank, clusters in self._ranks(rows):
            self._all.wgmma_starts(self._warp(warp, rank), products, clusters)

    def wgmma_commits(self, warp: Actor, rows: Rows) -> None:
        for rank, clusters in self._ranks(rows):
            self._all.wgmma_commits(self._warp(warp, rank), clusters)

    def wgmma_waits(self, warp: Actor, pending: int, rows: Rows) -> None:
        for rank, clusters in self._ranks(rows):
            self._all.wgmma_waits(self._warp(warp, rank), pending, clusters)

    def bulk_reads(self, access: AgentAccess) -> None:
        for _, each in self._agents(access):
            self._all.bulk_reads(each)

    def bulk_commits(self, warp: Actor, mask: Mask) -> None:
        for rank, own in self._masks(mask):
            self._all.bulk_commits(self._warp(warp, rank), own)

    def bulk_waits(self, warp: Actor, pending: int, mask: Mask) -> None:
        for rank, own in self._masks(mask):
            self._all.bulk_waits(self._warp(warp, rank), pending, own)

    def check_end(self) -> None:
        self._all.check_end()
