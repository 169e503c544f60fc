"""Bulk copies: cp.async.bulk and TMA's cp.async.bulk.tensor, started by one thread and done by an agent of their own
(PTX ISA, 9.7.9.25.4 and 9.7.9.27).

A copy into shared memory tells an mbarrier when it has landed: as late as possible, when no warp can go on without it.
A copy out of shared memory, or a reduction, belongs to a bulk group of its thread: its source is read as late as the
first wait_group that covers it, and global memory is written at the first one without .read, or at the end of the
kernel. Without `lazy_copies` all of this happens at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NoReturn

import numpy as np

from flashladder.common.errors import UnsupportedProblemError

from .. import tensor_map
from ..errors import MemoryAccessError
from .arithmetic import bf16_round, bf16_widen, flush
from .arrays import Array, Mask, classes
from .chunk import Warp
from .cluster import RANK_BITS
from .counters import WAVEFRONT_BYTES
from .mbarrier import mbarriers_of
from .memory import AccessFault
from .shared import WINDOW
from .spaces import resolve
from .tiles import CHUNK, Region, Stretch, Tile
from .watcher import AgentAccess

_IN_CTA = (1 << RANK_BITS) - 1
_TILE_ALIGNMENT = 128  # of a tile in shared memory (PTX ISA, 5.5.6, "Interleave layout": without interleaving)
_REDUCED_TYPES = {"uint32": "u32", "int32": "s32", "uint64": "u64", "int64": "s64", "fp16": "f16"}
_FUNCTIONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip


@dataclass(frozen=True)
class Reduction:
    """How a copy's elements are combined with what is there: a function by name, and PTX's type of an element; fp32 is
    that of a tensor map, which keeps subnormals (an H200 does) as its FTZ sibling would not."""

    function: str
    type: str

    def __call__(self, old: np.ndarray, new: np.ndarray) -> np.ndarray:
        """The combined chunks."""
        code = {"f32": "f4", "fp32": "f4", "f64": "f8", "f16": "f2", "bf16": "u2"}.get(self.type)
        code = code or f"{'i' if self.type[0] == 's' else 'u'}{int(self.type[1:]) // 8}"
        a, b = old.view(code), np.ascontiguousarray(new).view(code)
        if self.type == "bf16":
            found = bf16_round(_FUNCTIONS[self.function](bf16_widen(a), bf16_widen(b)))
        elif self.type == "f32":
            found = flush(_FUNCTIONS[self.function](flush(a), flush(b)))  # PTX ISA, cp.reduce.async.bulk
        else:
            found = _FUNCTIONS[self.function](a, b)
        return found.view(old.dtype)


@dataclass(frozen=True)
class Outgoing:
    """A copy out of shared memory that has not been done, of one lane in CTAs `rows` (bool).

    Attributes:
        index, lane: the instruction and its lane.
        group: the bulk group of the lane that it belongs to, in each CTA.
        units: its source, in units of 16 bytes of shared memory.
        target: its destination, of all CTAs.
        reduction: how it is combined with what is there; None: it replaces it.
        data: its source's chunks, (all CTAs, chunks), once it has been read.
    """

    index: int
    lane: int
    rows: np.ndarray
    group: np.ndarray
    units: np.ndarray
    target: Region
    reduction: Reduction | None
    data: np.ndarray | None = None


class Source(ABC):
    """The operands that name a region of global memory, as arrays of all CTAs and lanes."""

    @abstractmethod
    def regions(
        self, queue: "BulkQueue", index: int, lane: int, rows: np.ndarray, others: Sequence[Array]
    ) -> Iterator[tuple[Region, np.ndarray]]:
        """The regions of one lane, of all CTAs each; and the CTAs (bool) of `rows` in which it is that one, and
        the other operands agree."""


@dataclass(frozen=True)
class BytesOperand(Source):
    """[address], size."""

    address: Array
    size: Array

    def regions(
        self, queue: "BulkQueue", index: int, lane: int, rows: np.ndarray, others: Sequence[Array]
    ) -> Iterator[tuple[Region, np.ndarray]]:
        """See Source."""
        starts = np.broadcast_to(_lane(self.address, lane), rows.shape)
        for chosen in _alike(rows, lane, (self.size, *others)):
            size = _value(self.size, lane, chosen)
            if size % CHUNK or (starts[chosen] % np.uint64(CHUNK)).any():
                queue.fail(index, lane, chosen, f"a bulk copy of {size} bytes: size and address go by {CHUNK}")
            yield Stretch(starts, size), chosen


@dataclass(frozen=True)
class TileOperand(Source):
    """[map, {coordinates}]."""

    map: Array
    coordinates: tuple[Array, ...]

    def regions(
        self, queue: "BulkQueue", index: int, lane: int, rows: np.ndarray, others: Sequence[Array]
    ) -> Iterator[tuple[Region, np.ndarray]]:
        """See Source."""
        first = np.stack([np.broadcast_to(_lane(each, lane), rows.shape) for each in self.coordinates], axis=1)
        for chosen in _alike(rows, lane, (self.map, *others)):
            found = queue.map_at(index, lane, chosen, _value(self.map, lane, chosen))
            if len(found.dims) != len(self.coordinates):
                queue.fail(index, lane, chosen, f"{len(self.coordinates)} coordinates in a tensor of {len(found.dims)}")
            tile = Tile(found, first.astype(np.int64))
            if (tile.of(chosen).start % CHUNK).any():
                queue.fail(index, lane, chosen, f"a tile whose rows do not begin at a multiple of {CHUNK} bytes")
            yield tile, chosen


class BulkQueue:
    """What a warp's threads do with bulk copies."""

    def __init__(self, warp: Warp) -> None:
        self._warp, self._chunk, self._mbarriers = warp, warp.chunk, mbarriers_of(warp.chunk)
        self._commits = np.zeros((1, 32), np.int64)
        self._pending: list[Outgoing] = []

    # -- into shared memory

    def load(self, index: int, target: Array, source: Source, barrier: Array, ctas: Array | None, mask: Mask) -> None:
        """A copy from global to shared memory, whose bytes an mbarrier counts: of the own CTA, of the one that the
        addresses name, or of each of the cluster whose bit is set in `ctas` (.multicast::cluster)."""
        self._mbarriers.check(self._warp, index, barrier, mask)
        others = (target, barrier) if ctas is None else (target, barrier, ctas)
        for lane, rows in self._lanes(mask):
            for region, chosen in source.regions(self, index, lane, rows, others):
                place, counter = _value(target, lane, chosen), _value(barrier, lane, chosen)
                units = self._units(index, lane, chosen, region, place & _IN_CTA)
                access = self._access(index, lane, units, chosen, "copies to it")
                if self._chunk.watcher:
                    part = region.of(chosen)
                    self._chunk.watcher.global_bulk(self._warp, index, lane, chosen, part, "reads it")
                for rank in self._ranks(index, lane, chosen, place, counter, ctas):
                    if self._chunk.watcher:
                        self._chunk.watcher.agent_writes(access, counter & _IN_CTA, at=rank)
                    land = partial(self._land, access, region, chosen, counter & _IN_CTA, rank)
                    if self._chunk.machine.lazy_copies:
                        self._chunk.in_flight.append(land)
                    else:
                        land()

    def _ranks(
        self, index: int, lane: int, rows: np.ndarray, place: int, barrier: int, ctas: Array | None
    ) -> list[int | None]:
        """The CTAs of the cluster that a copy goes to; None: the own one."""
        of_place, of_barrier = place >> RANK_BITS, barrier >> RANK_BITS
        if of_place != of_barrier:
            self.fail(index, lane, rows, "a copy to one CTA whose mbarrier is in another")
        if ctas is None:
            return [of_place - 1 if of_place else None]
        bits, size = _value(ctas, lane, rows) & 0xFFFF, self._chunk.cluster.size
        if not bits or bits >> size:
            self.fail(index, lane, rows, f"a copy to the CTAs {bits:#x} of a cluster of {size}")
        return [rank for rank in range(size) if bits >> rank & 1]

    def _land(self, access: AgentAccess, region: Region, rows: np.ndarray, barrier: int, rank: int | None) -> None:
        assert access.lane is not None
        part = region.of(rows)
        with self._faults(access.index, access.lane, region, rows):
            data = part.load(self._chunk.machine.memory)
        self._count(access.index, part, rows)
        view = self._chunk.shared.views[CHUNK]
        if rank is None:
            view[_cells(rows, access.units)] = data
        else:
            view[self._chunk.cluster.rows_of(np.nonzero(rows)[0], rank)[:, None], access.units] = data
            barrier |= rank + 1 << RANK_BITS
        if self._chunk.watcher:
            self._chunk.watcher.agent_lands(access, barrier, at=rank)
        self._mbarriers.complete_tx(barrier, region.num_bytes, access.rows)

    # -- out of shared memory

    def store(
        self, index: int, target: Source, source: Array, function: str | None, type: str | None, mask: Mask
    ) -> None:
        """A copy from shared to global memory, or a reduction, in a bulk group of each thread."""
        for lane, rows in self._lanes(mask):
            group = np.broadcast_to(self._commits[:, lane], rows.shape)
            for region, chosen in target.regions(self, index, lane, rows, (source,)):
                units = self._units(index, lane, chosen, region, _value(source, lane, chosen))
                if isinstance(region, Tile):
                    self._check_stored(index, lane, chosen, region.of(chosen))
                if self._chunk.watcher:
                    self._chunk.watcher.bulk_reads(self._access(index, lane, units, chosen, "copies from it"))
                    if function:
                        self._chunk.watcher.global_sum_begins(self._warp, index, lane, chosen, region.of(chosen))
                kind = type or (region.map.dtype if isinstance(region, Tile) else "")
                reduction = Reduction(function, _REDUCED_TYPES.get(kind, kind)) if function else None
                copy = Outgoing(index, lane, chosen, group, units, region, reduction)
                if self._chunk.machine.lazy_copies:
                    self._pending.append(copy)
                else:
                    self._write(self._read(copy))

    def _check_stored(self, index: int, lane: int, rows: np.ndarray, tile: Tile) -> None:
        if tile.is_cut_within_chunks:
            self.fail(index, lane, rows, f"a store of a tile that the tensor's edge cuts within {CHUNK} bytes")
        if tile.begins_before:
            self.fail(index, lane, rows, "a store of a tile that begins before its tensor: an H200 has no such one")

    def commit(self, index: int, mask: Mask) -> None:
        """cp.async.bulk.commit_group."""
        self._commits = self._commits + (1 if mask is None else mask)
        if self._chunk.watcher:
            self._chunk.watcher.bulk_commits(self._warp, mask)

    def wait(self, index: int, allowed: int, reads_only: bool, mask: Mask) -> None:
        """cp.async.bulk.wait_group{.read}: all but the latest `allowed` groups of a thread are done, or read."""
        committed = self._commits - allowed
        active = np.ones((1, 32), bool) if mask is None else mask
        self._finish(
            lambda copy: copy.rows & active[:, copy.lane % active.shape[1]] & (copy.group < committed[:, copy.lane]),
            reads_only,
        )
        if self._chunk.watcher:
            self._chunk.watcher.bulk_waits(self._warp, allowed, mask)

    def finish(self) -> None:
        """The end of the kernel: everything is done."""
        self._finish(lambda copy: copy.rows, reads_only=False)

    def _finish(self, covered: Callable[[Outgoing], np.ndarray], reads_only: bool) -> None:
        pending, self._pending = self._pending, []
        for copy in pending:
            done = covered(copy)
            if (left := copy.rows & ~done).any():
                self._pending.append(replace(copy, rows=left))
            if done.any():
                read = self._read(replace(copy, rows=done))
                if reads_only:
                    self._pending.append(read)
                else:
                    self._write(read)

    def _read(self, copy: Outgoing) -> Outgoing:
        if copy.data is not None:
            return copy
        return replace(copy, data=self._chunk.shared.views[CHUNK][:, copy.units])

    def _write(self, copy: Outgoing) -> None:
        memory, data = self._chunk.machine.memory, copy.data
        assert data is not None
        part = copy.target.of(copy.rows)
        self._chunk.machine.global_writes += 1
        if self._chunk.watcher:
            self._chunk.watcher.global_bulk(self._warp, copy.index, copy.lane, copy.rows, part, "writes it")
        self._count(copy.index, part, copy.rows)
        with self._faults(copy.index, copy.lane, copy.target, copy.rows):
            if copy.reduction is None:
                part.store(memory, data[copy.rows])
                return
            for row in np.nonzero(copy.rows)[0]:  # one after the other: CTAs may add to the same place
                target = copy.target.of(np.array([row]))
                target.store(memory, copy.reduction(target.load(memory), data[row : row + 1]))

    # -- parts

    def _access(self, index: int, lane: int, units: np.ndarray, rows: np.ndarray, does: str) -> AgentAccess:
        return AgentAccess(self._warp, index, lane, units, self._chunk.machine.granule, _where(rows), does)

    def _count(self, index: int, region: Region, rows: np.ndarray) -> None:
        """Adds the traffic of a copy that is done. Shared memory is taken to move it without bank conflicts."""
        ctas, counters = int(rows.sum()), self._chunk.counters
        moved = ctas * region.num_bytes
        wavefronts = -(-moved // WAVEFRONT_BYTES)
        counters.shared[index].add(ctas, wavefronts, wavefronts, moved, moved // 4)
        sectors, bytes = region.traffic
        counters.global_memory[index].add(ctas, sectors, -(-bytes // 32), bytes)

    def _lanes(self, mask: Mask) -> Iterator[tuple[int, np.ndarray]]:
        """The active lanes, and the CTAs (bool) in which each of them is."""
        count = len(self._chunk.cta_ids)
        active = np.broadcast_to(True if mask is None else mask, (count, 32))
        for lane in np.nonzero(active.any(axis=0))[0].tolist():
            yield lane, active[:, lane]

    def _units(self, index: int, lane: int, rows: np.ndarray, region: Region, address: int) -> np.ndarray:
        """The units of 16 bytes in shared memory of a region that begins at an address."""
        offsets, size = region.places(address) - WINDOW, self._chunk.machine.shared_bytes
        first, last = int(offsets.min()), int(offsets.max())
        alignment = _TILE_ALIGNMENT if isinstance(region, Tile) else CHUNK
        if (address - WINDOW) % alignment or first < 0 or last > size - CHUNK:
            what = f"a copy of {region.num_bytes} bytes at offset {address - WINDOW} of {size} bytes of shared memory"
            self.fail(index, lane, rows, f"{what}: out of bounds, or not at a multiple of {alignment}")
        return offsets >> 4

    @contextmanager
    def _faults(self, index: int, lane: int, region: Region, rows: np.ndarray) -> Iterator[None]:
        """Says of a fault in global memory who caused it."""
        try:
            yield
        except AccessFault as fault:
            wrong = (region.elements[0] == fault.culprit).any(axis=1) & rows
            self.fail(index, lane, wrong, f"a bulk copy: {fault}")

    def fail(self, index: int, lane: int, rows: np.ndarray, message: str) -> NoReturn:
        """Raises a MemoryAccessError."""
        raise MemoryAccessError(f"{message}\n  {self._warp.at(index, int(np.argmax(rows)), lane)}")

    def map_at(self, index: int, lane: int, rows: np.ndarray, address: int) -> tensor_map.TensorMap:
        """The tensor map at a generic address, in the parameters or in global memory."""
        machine = self._chunk.machine
        space, where = resolve(self._warp, index, np.full((1, 1), address, np.uint64), None)
        place = int(where[0, 0])
        if place % tensor_map.ALIGNMENT:
            self.fail(index, lane, rows, f"a tensor map that is not at a multiple of {tensor_map.ALIGNMENT} bytes")
        try:
            if space == "param":
                return _decoded(machine.params[place : place + tensor_map.NUM_BYTES])
            if space == "global":
                chunks = np.uint64(place) + np.arange(0, tensor_map.NUM_BYTES, CHUNK, dtype=np.uint64)
                return _decoded(machine.memory.load(chunks, CHUNK).tobytes())
        except (UnsupportedProblemError, AccessFault) as error:
            self.fail(index, lane, rows, f"{error}")
        return self.fail(index, lane, rows, f"a tensor map in {space} memory")


@lru_cache(maxsize=64)
def _decoded(data: bytes) -> tensor_map.TensorMap:
    return tensor_map.decode(data)


def _lane(values: Array, lane: int) -> np.ndarray:
    """What a lane has, (1 or CTAs)."""
    return values[:, lane if values.shape[1] > 1 else 0]


def _value(values: Array, lane: int, rows: np.ndarray) -> int:
    """What a lane has in the first of these CTAs."""
    own = _lane(values, lane)
    return int(own[int(np.argmax(rows)) if len(own) > 1 else 0])


def _alike(rows: np.ndarray, lane: int, values: Sequence[Array]) -> list[np.ndarray]:
    """The CTAs, in classes in which a lane has the same of each."""
    return classes(rows, [_lane(each, lane) for each in values if len(each) > 1])


def _where(rows: np.ndarray) -> np.ndarray | None:
    return None if rows.all() else np.nonzero(rows)[0]


def _cells(rows: np.ndarray, units: np.ndarray) -> tuple[slice | np.ndarray, np.ndarray]:
    """An index of these units in these CTAs."""
    where = _where(rows)
    return (slice(None), units) if where is None else (where[:, None], units)
