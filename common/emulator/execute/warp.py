"""What the generated code asks of a warp: special registers, addresses, exchanges between lanes, fences, memory."""

from collections.abc import Callable

import numpy as np

from ..errors import ConvergenceError, EmulatorError, UninitialisedRegisterError
from . import exchange
from .access import WarpAccess
from .arrays import ALL_LANES, Array, Mask, either, has_lanes, narrow
from .chunk import Chunk, Warp
from .cluster import RANK_BITS, ranks_of, without_rank
from .mbarrier import mbarriers_of
from .spaces import GENERIC_BASE, is_in

_FULL = 0xFFFFFFFF
_EVERY_LANE = np.ones((1, 32), bool)
_NO_LANE = np.zeros((1, 1), bool)


class RunningWarp(Warp):
    """What the generated code asks of a warp. `access`: its memory side."""

    def __init__(self, chunk: Chunk, index: int) -> None:
        super().__init__(chunk, index)
        self.access, self.mbarriers = WarpAccess(self), mbarriers_of(chunk)
        self._written: dict[int, Mask] = {}  # of doubtful registers: the lanes that have written them
        self._special = special_registers(chunk, index)

    def note_written(self, slot: int, mask: Mask) -> None:
        """Lanes write a doubtful register."""
        self._written[slot] = either(mask, self._written.get(slot, _NO_LANE))

    def require_written(self, index: int, name: str, slot: int, mask: Mask) -> None:
        """Raises if one of the lanes that use a doubtful register has not written it."""
        written = self._written.get(slot, _NO_LANE)
        if written is None:
            return
        missing = narrow(mask, ~written)
        if missing.any():
            row, lane = (int(n[0]) for n in np.nonzero(missing))
            raise UninitialisedRegisterError(
                f"register {name} is read before it is written\n  {self.at(index, row, lane)}"
            )

    # -- names

    def special(self, name: str) -> Array:
        """A special register; clocks count the instructions that this warp has executed."""
        if name in ("%clock", "%clock64", "%globaltimer"):
            return np.full((1, 1), self.executed, "u4" if name == "%clock" else "u8")
        found = self._special.get(name)
        if found is None:
            raise EmulatorError(f"the emulator does not know the special register {name}")
        return found

    def address_of(self, name: str, offset: int) -> Array:
        """The address (u8) of a variable in its own space, plus an offset."""
        return np.full((1, 1), self.chunk.machine.addresses[name] + offset, np.uint64)

    def to_generic(self, space: str, address: Array) -> Array:
        """cvta."""
        return address + np.uint64(GENERIC_BASE.get(space, 0))

    def from_generic(self, space: str, address: Array) -> Array:
        """cvta.to."""
        return address - np.uint64(GENERIC_BASE.get(space, 0))

    def map_address(self, address: Array, rank: Array, is_generic: bool) -> Array:
        """mapa: the same place in the CTA of a rank of the cluster."""
        base = address.dtype.type(GENERIC_BASE["shared"] if is_generic else 0)
        return base + (without_rank(address - base) | (rank + np.uint32(1)).astype(address.dtype) << RANK_BITS)

    def rank_of(self, address: Array, is_generic: bool) -> Array:
        """getctarank: the CTA that an address of shared memory belongs to."""
        ranks = ranks_of(address - address.dtype.type(GENERIC_BASE["shared"] if is_generic else 0))
        own = self.special("%cluster_ctarank")
        return np.where(ranks > 0, ranks - ranks.dtype.type(1), own).astype(np.uint32)

    def is_space(self, space: str, address: Array) -> Array:
        """isspacep."""
        return is_in(space, address)

    # -- errors

    def trap(self, index: int, mask: Mask) -> None:
        """trap."""
        row, lane = (0, 0) if mask is None else (int(n[0]) for n in np.nonzero(mask))
        raise EmulatorError(f"trap\n  {self.at(index, row, lane)}")

    def _groups(self, index: int, members: Array, mask: Mask) -> list[tuple[np.ndarray, np.ndarray]]:
        """The lanes that execute a .sync instruction for one member mask, (1 or CTAs, 32), and the lanes that this mask
        names and that have not left; for every mask that lanes come with.

        Raises ConvergenceError if a member is elsewhere, or a lane is no member itself: PTX says that is undefined.
        """
        if mask is None and members.size == 1 and members[0, 0] == _FULL:
            return [(_EVERY_LANE, _EVERY_LANE)]
        shape = np.broadcast_shapes(members.shape, (1, 32) if mask is None else mask.shape, (1, 32))
        active = np.broadcast_to(True if mask is None else mask, shape)
        groups = []
        for value in np.unique(np.broadcast_to(members, shape)[active]).tolist():
            here = active & (members == value)
            named = value >> ALL_LANES[None] & 1 == 1
            self._forbid(index, here & ~named, f"this lane executes it, but its mask {value:#x} does not name it")
            expected = named if self.live is None else named & self.live
            self.require(index, expected, here, "a warp-wide instruction")
            groups.append((here, expected))
        return groups

    def _forbid(self, index: int, wrong: np.ndarray, reason: str) -> None:
        """Raises at the first lane of (rows, 32) that is wrong."""
        if wrong.any():
            row, lane = (int(n) for n in np.argwhere(wrong)[0])
            raise ConvergenceError(f"{reason}\n  {self.at(index, row, lane)}")

    # -- exchanges

    def shuffle(
        self, index: int, mode: str, value: Array, lane: Array, clamp: Array, members: Array, mask: Mask
    ) -> tuple[Array, Array]:
        """shfl.sync: the values, and whether their lanes lie within the segment."""
        source, inside = exchange.shuffle_sources(mode, lane, clamp)
        for here, expected in self._groups(index, members, mask):
            if not expected.all():
                read, expected = np.broadcast_arrays(source, expected)
                unnamed = here & ~np.take_along_axis(expected, read, axis=1)
                self._forbid(index, unnamed, "this lane reads one that its mask does not name, or that has left")
        return exchange.shuffle(value, source), inside

    def vote(self, index: int, mode: str, predicate: Array, members: Array, mask: Mask) -> Array:
        """vote.sync."""
        return self._by_group(index, members, mask, lambda group: exchange.vote(mode, predicate, group))

    def reduce(self, index: int, name: str, value: Array, members: Array, mask: Mask) -> Array:
        """redux.sync."""
        return self._by_group(index, members, mask, lambda group: exchange.reduce(name, value, group))

    def _by_group(self, index: int, members: Array, mask: Mask, function: Callable[[np.ndarray], Array]) -> Array:
        """What a function of the participating lanes gives to each lane."""
        groups = self._groups(index, members, mask)
        if not groups:  # no lane passes the guard
            return function(_EVERY_LANE)
        result = function(groups[0][1])
        for here, group in groups[1:]:
            result = np.where(here, function(group), result)
        return result

    def elect(self, index: int, members: Array, mask: Mask) -> Array:
        """elect.sync: the lowest of the lanes that take part."""
        return self._by_group(index, members, mask, lambda group: group.argmax(axis=1)[:, None].astype(np.uint32))

    def fence(self, kind: str, mask: Mask) -> None:
        """A fence, see Watcher."""
        if self.chunk.watcher:
            self.chunk.watcher.fence(kind, self, mask)

    def wait_for_grids(self, mask: Mask) -> None:
        """griddepcontrol.wait."""
        if self.chunk.watcher:
            self.chunk.watcher.prerequisites_done(self, mask)

    def sync_warp(self, index: int, members: Array, mask: Mask) -> None:
        """bar.warp.sync: orders the lanes' earlier accesses before their later ones."""
        for here, _ in self._groups(index, members, mask):
            if self.chunk.watcher:
                live = _EVERY_LANE if self.live is None else self.live
                if (live & ~here & has_lanes(here)[:, None]).any():
                    self.chunk.watcher.sync_lanes(self.index, here)
                else:
                    self.chunk.watcher.sync_warp(self.index, self.chunk.rows(here))

    def active_mask(self, mask: Mask) -> Array:
        """activemask."""
        lanes = np.ones((1, 32), bool) if mask is None else np.broadcast_to(mask, (mask.shape[0], 32))
        return exchange.vote("ballot", lanes, lanes)


def special_registers(chunk: Chunk, warp: int) -> dict[str, Array]:
    """The special registers of a warp; those that are the same everywhere stay (1, 1)."""
    machine = chunk.machine
    values = {
        "tid.y": 0, "tid.z": 0, "ntid.x": machine.num_threads, "ntid.y": 1, "ntid.z": 1, "warpid": warp,
        "nwarpid": machine.num_warps, "smid": 0, "nsmid": 1, "gridid": 0, "dynamic_smem_size": machine.dynamic_shared,
        "total_smem_size": machine.shared_bytes, "nctaid.x": machine.grid[0], "nctaid.y": machine.grid[1],
        "nctaid.z": machine.grid[2],
    }  # fmt: skip
    found = {f"%{name}": np.full((1, 1), value, np.uint32) for name, value in values.items()}
    lanes = ALL_LANES.astype(np.uint32)[None]
    equal = np.uint32(1) << lanes
    below = equal - np.uint32(1)
    found |= {"%tid.x": lanes + np.uint32(32 * warp), "%laneid": lanes}
    found |= {"%lanemask_eq": equal, "%lanemask_lt": below, "%lanemask_le": equal | below}
    found |= {"%lanemask_gt": ~(equal | below), "%lanemask_ge": ~below}
    for n, (axis, own) in enumerate(zip("xyz", chunk.coordinates(), strict=True)):
        extent = np.uint32(chunk.cluster.shape[n])
        for name, value in (("ctaid", own), ("cluster_ctaid", own % extent), ("clusterid", own // extent)):
            found[f"%{name}.{axis}"] = value if (value != value[0]).any() else value[:1]
        found[f"%cluster_nctaid.{axis}"] = np.full((1, 1), extent)
        found[f"%nclusterid.{axis}"] = np.full((1, 1), machine.grid[n] // chunk.cluster.shape[n], np.uint32)
    ranks = chunk.cluster.ranks.astype(np.uint32)[:, None]
    found["%cluster_ctarank"] = ranks if chunk.cluster.size > 1 else ranks[:1]
    found["%cluster_nctarank"] = np.full((1, 1), chunk.cluster.size, np.uint32)
    return found
