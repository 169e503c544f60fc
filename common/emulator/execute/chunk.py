"""CTAs that run together, their warps, and the gates at which these wait: what all that executes works on.

An instruction that may have to wait ends its block, whose function returns a GateCall; `enter` performs it. A lane that
comes to a closed gate is put aside until the gate opens. Barriers are gates, and so are mbarriers (so that try_wait is
never executed as a spin), the pool of registers and more, each in Chunk.gates under a name of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar, cast

import numpy as np

from ..compile.program import PtxBlock
from ..errors import ConvergenceError
from .arrays import Array, Mask, either, every_lane, first_lanes, has_lanes, narrow
from .cluster import Cluster
from .counters import SECTOR_BYTES
from .machine import Machine
from .shared import SharedMemory
from .watcher import Watcher

_EVERY_LANE = np.ones((1, 32), bool)

W = TypeVar("W", bound="Waiting")
G = TypeVar("G", bound="Gate")


class GateCall(Protocol):
    """What the function of a block returns that ends with an instruction which may have to wait."""

    def enter(self, chunk: "Chunk", warp: "Warp", mask: Mask, block: int) -> None:
        """Lanes come to the end of a block: they are sent on, or put aside at a gate."""


@dataclass(frozen=True)
class Waiting:
    """Lanes of a warp that wait at a gate, the block they go on with, and the register that awaits a value."""

    warp: "Warp"
    block: int
    mask: Mask
    target: int | None = None

    def stopped_at(self, blocks: Sequence[PtxBlock]) -> int:
        """The instruction that they wait at."""
        return blocks[self.block - 1].last.index

    def includes(self, row: int) -> bool:
        """Whether lanes of this CTA of the chunk are among them."""
        return self.mask is None or bool(self.mask[row if len(self.mask) > 1 else 0].any())

    def part(self: W, rows: np.ndarray) -> W | None:
        """Those in the CTAs of `rows` (bool a CTA); None if there are none."""
        if rows.all():
            return self
        mask = narrow(self.mask, rows[:, None])
        return replace(self, mask=mask) if mask.any() else None

    def go_on(self, value: Array | None = None) -> None:
        """Sends them to their block, with what their register awaits."""
        if self.target is not None and value is not None:
            registers = self.warp.registers
            registers[self.target] = value if self.mask is None else np.where(self.mask, value, registers[self.target])
        self.warp.send(self.block, self.mask)


class Gate(Protocol):
    """What the scheduler needs of a gate."""

    @property
    def waiting(self) -> Sequence[Waiting]:
        """Those who wait."""

    def open(self, stuck: bool) -> bool:
        """Lets those go on whose wait is over; whether there were any. `stuck`: no warp of the chunk can go on."""

    def progress(self, each: Waiting, row: int) -> str:
        """What a CTA's lanes wait for, and how far it is, for a deadlock's report."""


class Warp:
    """Warp `index` of every CTA of a chunk.

    Attributes:
        registers: one Array a slot of the program.
        live: the lanes that exist and have not left.
        ready: the blocks that lanes are about to run, and the masks of these lanes.
        executed: instructions so far.
        lags: it goes on only when no other warp can, and only as far as its next synchronisation.
    """

    def __init__(self, chunk: "Chunk", index: int) -> None:
        self.chunk, self.index = chunk, index
        self.registers = list(chunk.program.zeros)
        lanes = min(32, chunk.machine.num_threads - 32 * index)
        self.live: Mask = None if lanes == 32 else first_lanes(lanes)
        self.ready: dict[int, Mask] = {0: self.live}
        self.executed = 0
        self.lags = index in chunk.machine.lagging

    def send(self, block: int, mask: Mask) -> None:
        """Puts lanes before a block, with those that stand there already."""
        self.ready[block] = either(mask, self.ready[block]) if block in self.ready else mask

    def pass_guard(self, mask: Mask, guard: Array | None, following: int) -> Mask:
        """Sends the lanes that fail an instruction's guard to the following block; the others."""
        if guard is None:
            return mask
        failing = narrow(mask, ~guard)
        if failing.any():
            self.send(following, failing)
        return narrow(mask, guard)

    def at(self, index: int, row: int, lane: int | None = None) -> str:
        """Who executes an instruction, and where it stands in the source."""
        who = f"CTA {self.chunk.cta_name(row)}, warp {self.index}" + ("" if lane is None else f", lane {lane}")
        return f"{who}, {self.chunk.program.kernel.instructions[index].described()}"

    def converged(self, index: int, mask: Mask) -> None:
        """Checks that the warps which execute an .aligned instruction do so with all their lanes."""
        if mask is not None:
            self.require(index, _EVERY_LANE, mask, "a warp-wide instruction")

    def require(self, index: int, wanted: np.ndarray, mask: np.ndarray, what: str) -> None:
        """Raises if lanes that `what` needs, (1 or CTAs, 32), are not here in a CTA where others are."""
        missing = wanted & ~mask & has_lanes(mask)[:, None]
        if missing.any():
            row = int(np.argmax(has_lanes(missing)))
            lanes = np.nonzero(every_lane(missing)[row])[0].tolist()
            message = f"{what} in divergent code: lanes {lanes} should take part, but are elsewhere or have left"
            raise ConvergenceError(f"{message}\n  {self.at(index, row)}")


class Chunk:
    """CTAs that run together; row r of every Array belongs to CTA `cta_ids[r]` (x fastest).

    Attributes:
        in_flight: what lands when no warp can go on.
        watcher: who watches them; None: nobody.
    """

    def __init__(self, machine: Machine, cta_ids: np.ndarray) -> None:
        self.machine, self.cta_ids = machine, cta_ids
        self.program, self.counters = machine.program, machine.counters
        self.cluster = Cluster(machine.cluster, len(cta_ids))
        self.shared = SharedMemory(len(cta_ids), machine.patterns)
        self.gates: dict[str, Gate] = {}
        self.in_flight: list[Callable[[], None]] = []
        self.watcher: Watcher | None = None
        self.warps: Sequence[Warp] = ()

    def gate(self, name: str, make: Callable[[], G]) -> G:
        """The gate of a name, which is made where there is none yet."""
        found = self.gates.get(name)
        if found is None:
            found = self.gates[name] = make()
        return cast(G, found)

    def coordinates(self) -> list[Array]:
        """ctaid x, y, z of every row, (CTAs, 1) u4."""
        x, y, _ = self.machine.grid
        ids = self.cta_ids
        return [part.astype(np.uint32)[:, None] for part in (ids % x, ids // x % y, ids // (x * y))]

    def cta_name(self, row: int) -> str:
        """The coordinates of a row's CTA."""
        return "(" + ", ".join(str(int(part[row, 0])) for part in self.coordinates()) + ")"

    def rows(self, mask: Mask) -> np.ndarray | None:
        """The CTAs that a mask has lanes of; None: all."""
        if mask is None or len(mask) == 1:
            return None
        active = has_lanes(mask)
        return None if active.all() else np.nonzero(active)[0]

    def count_global(self, index: int, address: Array, size: int, mask: Mask) -> None:
        """Adds the sectors of one access; inactive lanes repeat an active address of their CTA."""
        sectors = np.sort(address >> np.uint64(5), axis=1)
        changes = sectors[:, 1:] != sectors[:, :-1]
        ctas = len(self.cta_ids)
        if mask is None:
            requests, lanes, ideal = ctas, 32 * ctas, ctas * size
            units = ctas + int(np.count_nonzero(changes)) * (ctas // len(sectors))
        else:
            active = np.broadcast_to(mask, (ctas, 32))
            rows, of_row = has_lanes(active), active.sum(axis=1)
            requests, lanes, ideal = int(rows.sum()), int(of_row.sum()), int((-(-of_row * size // SECTOR_BYTES)).sum())
            units = int(((1 + changes.sum(axis=1)) * rows).sum())
        self.counters.global_memory[index].add(requests, units, ideal, lanes * size)
