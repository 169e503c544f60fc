"""One warp index across all CTAs of a chunk: its registers, and what the generated code asks of it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from . import exchange
from .access import GENERIC_BASE, WarpAccess, is_in
from .arrays import ALL_LANES, Array, Mask, either, every_lane, first_lanes, has_lanes, narrow
from .cluster import RANK_BITS, ranks_of, without_rank
from .errors import ConvergenceError, EmulatorError, UninitialisedRegisterError

if TYPE_CHECKING:
    from .scheduler import Chunk

_FULL = 0xFFFFFFFF
_EVERY_LANE = np.ones((1, 32), bool)
_NO_LANE = np.zeros((1, 1), bool)


class Warp:
    """Warp `index` of every CTA of a chunk.

    Attributes:
        registers: one Array a slot of the program.
        live: the lanes that exist and have not left.
        ready: the blocks that lanes are about to run, and the masks of these lanes.
        executed: instructions so far.
        lags: it goes on only when no other warp can, and only as far as its next synchronisation.
        access: its memory side.
    """

    def __init__(self, chunk: "Chunk", index: int, num_threads: int) -> None:
        self.chunk, self.index = chunk, index
        self.registers = [np.zeros((1, 1), reg.storage) for reg in chunk.program.slots]
        lanes = min(32, num_threads - 32 * index)
        self.live: Mask = None if lanes == 32 else first_lanes(lanes)
        self.ready: dict[int, Mask] = {0: self.live}
        self.executed = 0
        self.lags = index in chunk.machine.lagging
        self.access = WarpAccess(self)
        self._written: dict[int, Mask] = {}  # of doubtful registers: the lanes that have written them
        self._special = chunk.special_registers(index)

    def send(self, block: int, mask: Mask) -> None:
        """Puts lanes before a block, with those that stand there already."""
        self.ready[block] = either(mask, self.ready[block]) if block in self.ready else mask

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

    def at(self, index: int, row: int, lane: int | None = None) -> str:
        """Who executes an instruction, and where it stands in the source."""
        who = f"CTA {self.chunk.cta_name(row)}, warp {self.index}" + ("" if lane is None else f", lane {lane}")
        return f"{who}, {self.chunk.program.kernel.instructions[index].described()}"

    def trap(self, index: int, mask: Mask) -> None:
        """trap."""
        row, lane = (0, 0) if mask is None else (int(n[0]) for n in np.nonzero(mask))
        raise EmulatorError(f"trap\n  {self.at(index, row, lane)}")

    def converged(self, index: int, mask: Mask) -> None:
        """Checks that the warps which execute an .aligned instruction do so with all their lanes."""
        if mask is not None:
            self.require(index, _EVERY_LANE, mask, "a warp-wide instruction")

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

    def require(self, index: int, wanted: np.ndarray, mask: np.ndarray, what: str) -> None:
        """Raises if lanes that `what` needs, (1 or CTAs, 32), are not here in a CTA where others are."""
        missing = wanted & ~mask & has_lanes(mask)[:, None]
        if missing.any():
            row = int(np.argmax(has_lanes(missing)))
            lanes = np.nonzero(every_lane(missing)[row])[0].tolist()
            message = f"{what} in divergent code: lanes {lanes} should take part, but are elsewhere or have left"
            raise ConvergenceError(f"{message}\n  {self.at(index, row)}")

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
        """A fence: of the proxies ("proxy"), of initialised mbarriers, or of all, in the "cluster" or the "gpu"."""
        if self.chunk.race:
            if kind == "gpu":
                self.chunk.machine.global_races.fence(self, mask)
            self.chunk.race.fence(kind, self, mask)

    def wait_for_grids(self, mask: Mask) -> None:
        """griddepcontrol.wait."""
        if self.chunk.race:
            self.chunk.machine.global_races.prerequisites_done(self, mask)

    def sync_warp(self, index: int, members: Array, mask: Mask) -> None:
        """bar.warp.sync: orders the lanes' earlier accesses before their later ones."""
        for here, _ in self._groups(index, members, mask):
            if self.chunk.race:
                live = _EVERY_LANE if self.live is None else self.live
                if (live & ~here & has_lanes(here)[:, None]).any():
                    self.chunk.race.sync_lanes(self.index, here)
                else:
                    self.chunk.race.sync_warp(self.index, self.chunk.rows(here))

    def active_mask(self, mask: Mask) -> Array:
        """activemask."""
        lanes = np.ones((1, 32), bool) if mask is None else np.broadcast_to(mask, (mask.shape[0], 32))
        return exchange.vote("ballot", lanes, lanes)
