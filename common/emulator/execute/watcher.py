"""What a watcher is told of a run: the race detector is one. Nothing here knows who watches.

A Watcher has one method an event, called in the order in which things happen. Where nobody watches a chunk, its
`watcher` is None, and nothing is called.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from .arrays import Array, Mask, Rows
from .shared import AccessPattern
from .tiles import Region

UNIT = 16  # bytes: every access of an agent is made of whole units


class Actor(Protocol):
    """A warp, as far as a watcher has to know it: its number, and the lanes that have not left."""

    @property
    def index(self) -> int: ...
    @property
    def live(self) -> Mask: ...


@dataclass(frozen=True)
class Access:
    """What one warp does to shared memory, alike in CTAs `rows`: the instruction, the pattern, and a verb for reports.
    A `collective` read is the whole warp's, as ldmatrix is."""

    warp: Actor
    index: int
    pattern: AccessPattern
    rows: Rows
    does: str
    collective: bool = False

    @property
    def words(self) -> np.ndarray:
        """The words that it touches."""
        return self.pattern.words

    @property
    def lanes(self) -> np.ndarray | None:
        """The lane that asks for each of them; None: the warp as a whole."""
        return None if self.collective else self.pattern.word_lanes

    @property
    def threads(self) -> np.ndarray:
        """The thread of the CTA that touches each of them."""
        return 32 * self.warp.index + self.pattern.word_lanes


@dataclass(frozen=True)
class AgentAccess:
    """What asynchronous work does to shared memory, alike in CTAs `rows`.

    Attributes:
        warp, index, lane: who issued it: the warp, the instruction, the lane (None: the warp as a whole, as for wgmma).
        units: the 16-byte units that it touches, as offset // 16 in shared memory; each once.
        granule: the bytes of a word.
        rows: CTAs of the chunk; None: all.
        does: a verb for reports, as "reads by wgmma".
    """

    warp: Actor
    index: int
    lane: int | None
    units: np.ndarray
    granule: int
    rows: Rows
    does: str

    @cached_property
    def words(self) -> np.ndarray:
        """As of an Access."""
        per_unit = UNIT // self.granule
        return (self.units[:, None] * per_unit + np.arange(per_unit)).reshape(-1)

    @property
    def lanes(self) -> np.ndarray | None:
        """As of an Access."""
        return None if self.lane is None else np.array([self.lane])

    @property
    def threads(self) -> np.ndarray:
        """As of an Access."""
        return np.array([-1 if self.lane is None else 32 * self.warp.index + self.lane])


class Watcher(Protocol):
    """Sees what the CTAs of a chunk do. It raises where that is wrong."""

    # -- order

    def sync_warp(self, warp: int, rows: Rows) -> None:
        """A warp's lanes see each other's earlier accesses."""

    def sync_lanes(self, warp: int, lanes: np.ndarray) -> None:
        """These lanes, (1 or CTAs, 32), alone see each other's earlier accesses, and what each of them has seen."""

    def arrive(self, barrier: int, warp: int, rows: Rows) -> None:
        """A warp arrives at a barrier of its CTA."""

    def leave(self, barrier: int, warps: Sequence[int], rows: Rows) -> None:
        """A barrier opens for warps that wait at it."""

    def fence(self, kind: str, warp: Actor, mask: Mask) -> None:
        """A fence: of the proxies ("proxy"), of initialised mbarriers, or of all, in the "cluster" or the "gpu"."""

    def prerequisites_done(self, warp: Actor, mask: Mask) -> None:
        """griddepcontrol.wait."""

    def cluster_arrive(self, warp: Actor, mask: Mask, releases: bool) -> None:
        """barrier.cluster.arrive."""

    def cluster_ends(self, rows: Rows) -> None:
        """The barrier of these clusters (all their CTAs) is over."""

    def cluster_passed(self, warp: Actor, mask: Mask) -> None:
        """barrier.cluster.wait is over."""

    # -- accesses. `at`: the rank of the CTA whose shared memory it is, if not the own

    def read(self, access: Access, at: int | None = None) -> None:
        """A load."""

    def write(self, access: Access, at: int | None = None) -> None:
        """A store."""

    def atomic(self, access: Access, at: int | None = None) -> None:
        """Atomic operations."""

    def issue_copy(self, access: Access) -> None:
        """The start of cp.async."""

    def land_copy(self, access: Access) -> None:
        """The issuing lanes have waited for their cp.async."""

    def check_agreement(self, access: Access, differs: np.ndarray) -> None:
        """After a store: `differs` (CTAs, lanes) lost their values to those of other lanes."""

    def global_access(self, warp: Actor, index: int, address: Array, size: int, mask: Mask, does: str) -> None:
        """Lanes have accessed global memory."""

    def global_bulk(self, warp: Actor, index: int, lane: int, rows: np.ndarray, region: Region, does: str) -> None:
        """A copy that a lane has issued accesses a region of global memory in these CTAs (bool)."""

    def global_sum_begins(self, warp: Actor, index: int, lane: int, rows: np.ndarray, region: Region) -> None:
        """A reduction that a lane has issued may add to a region of global memory from now on in these CTAs (bool)."""

    # -- mbarriers

    def mbarrier_made(self, address: int, access: Access) -> None:
        """mbarrier.init by one lane of each CTA."""

    def mbarrier_unmade(self, address: int, access: Access) -> None:
        """mbarrier.inval by one lane of each CTA."""

    def mbarrier_used(self, address: int, warp: Actor, index: int, active: np.ndarray, rows: Rows) -> None:
        """Lanes, (32) or (rows, 32), use an mbarrier."""

    def mbarrier_arrive(self, address: int, warp: Actor, mask: Mask, is_narrow: bool = False) -> None:
        """Lanes arrive, with the scope of their CTA or a wider one."""

    def mbarrier_ends(self, address: int, phases: np.ndarray, rows: Rows) -> None:
        """A phase is over; `phases` (CTAs): how many are over now."""

    def mbarrier_passed(self, address: int, warp: Actor, mask: Mask) -> None:
        """Lanes have seen the end of the last phase."""

    # -- agents

    def agent_writes(self, access: AgentAccess, mbarrier: int, at: int | None = None) -> None:
        """The issue of a copy into shared memory that tells the mbarrier at this address when it lands."""

    def agent_lands(self, access: AgentAccess, mbarrier: int, at: int | None = None) -> None:
        """The copy has landed; the mbarrier has not been told yet."""

    def wgmma_reads(self, access: AgentAccess) -> None:
        """The issue of a wgmma: its warpgroup reads from now on until a wait_group."""

    def wgmma_starts(self, warp: Actor, products: Sequence[int], rows: Rows) -> None:
        """The issue of wgmmas, which have their registers' values."""

    def wgmma_commits(self, warp: Actor, rows: Rows) -> None:
        """wgmma.commit_group by one warp."""

    def wgmma_waits(self, warp: Actor, pending: int, rows: Rows) -> None:
        """wgmma.wait_group by one warp, which all but the latest `pending` groups of its warpgroup have passed."""

    def bulk_reads(self, access: AgentAccess) -> None:
        """The issue of a copy out of shared memory that a bulk group of the issuing lane tracks."""

    def bulk_commits(self, warp: Actor, mask: Mask) -> None:
        """cp.async.bulk.commit_group by lanes of a warp."""

    def bulk_waits(self, warp: Actor, pending: int, mask: Mask) -> None:
        """cp.async.bulk.wait_group{.read} by lanes of a warp: all but the latest `pending` groups of each have read."""

    def check_end(self) -> None:
        """All CTAs of the chunk have ended."""
