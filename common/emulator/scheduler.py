"""Runs a chunk of CTAs: one warp at a time, each up to a gate where it has to wait; then the gates that are full open.

A warp whose lanes (or CTAs) take different ways keeps, for every block, the mask of the lanes that stand before it, and
always runs the lowest block first: lanes that branched apart meet again where their ways join.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .arrays import ALL_LANES, Mask, either, narrow
from .codegen import Program
from .counters import Counters
from .errors import ConvergenceError, DeadlockError, InstructionBudgetError
from .race import RaceDetector
from .shared import SharedMemory
from .warp import Warp

if TYPE_CHECKING:
    from . import Machine


@dataclass
class Arrival:
    """Lanes that wait at a barrier, and the block they go on with."""

    warp: Warp
    block: int
    mask: Mask


class Barrier:
    """A named barrier of every CTA: a gate that opens when as many threads have arrived as it expects."""

    def __init__(self, number: int, num_ctas: int) -> None:
        self.number = number
        self.arrived = np.zeros(num_ctas, np.int64)
        self.expected = np.zeros(num_ctas, np.int64)
        self.waiting: list[Arrival] = []


class Chunk:
    """CTAs that run together; row r of every array belongs to CTA `cta_ids[r]` (linear: x fastest)."""

    def __init__(self, machine: "Machine", cta_ids: np.ndarray) -> None:
        self.machine, self.cta_ids = machine, cta_ids
        self.program: Program = machine.program
        self.counters: Counters = machine.counters
        self.shared = SharedMemory(len(cta_ids), machine.patterns)
        num_warps = -(-machine.num_threads // 32)
        self.warps = [Warp(self, index, machine.num_threads) for index in range(num_warps)]
        self.barriers: dict[int, Barrier] = {}
        self.race = RaceDetector(self, num_warps, -(-machine.shared_bytes // machine.granule)) if machine.race else None

    def coordinates(self) -> list[np.ndarray]:
        """ctaid x, y, z of every row, (CTAs, 1) u4."""
        x, y, _ = self.machine.grid
        ids = self.cta_ids
        return [part.astype(np.uint32)[:, None] for part in (ids % x, ids // x % y, ids // (x * y))]

    def cta_name(self, row: int) -> str:
        return "(" + ", ".join(str(int(part[row, 0])) for part in self.coordinates()) + ")"

    def rows(self, mask: Mask) -> Mask:
        """The CTAs that a mask has lanes of; None: all."""
        if mask is None or mask.shape[0] == 1:
            return None
        active = mask.any(axis=1)
        return None if active.all() else np.nonzero(active)[0]

    def special_registers(self, warp: int) -> dict[str, np.ndarray]:
        """The special registers of a warp; those that are the same everywhere stay (1, 1)."""

        def constant(value: int) -> np.ndarray:
            return np.full((1, 1), value, np.uint32)

        machine = self.machine
        lanes = ALL_LANES.astype(np.uint32)[None]
        one_bit = np.uint32(1) << lanes
        found = {
            "%tid.x": lanes + np.uint32(32 * warp), "%tid.y": constant(0), "%tid.z": constant(0),
            "%ntid.x": constant(machine.num_threads), "%ntid.y": constant(1), "%ntid.z": constant(1),
            "%laneid": lanes, "%warpid": constant(warp), "%nwarpid": constant(-(-machine.num_threads // 32)),
            "%smid": constant(0), "%nsmid": constant(1), "%gridid": constant(0),
            "%dynamic_smem_size": constant(machine.dynamic_shared), "%total_smem_size": constant(machine.shared_bytes),
            "%lanemask_eq": one_bit, "%lanemask_lt": one_bit - np.uint32(1), "%lanemask_le": one_bit * np.uint32(2) - np.uint32(1),
        }  # fmt: skip
        found["%lanemask_gt"], found["%lanemask_ge"] = ~found["%lanemask_le"], ~found["%lanemask_lt"]
        for axis, own, count in zip("xyz", self.coordinates(), machine.grid, strict=True):
            found[f"%ctaid.{axis}"] = own if (own != own[0]).any() else own[:1]
            found[f"%nctaid.{axis}"] = constant(count)
        return found

    def count_global(self, index: int, address: np.ndarray, size: int, mask: Mask) -> None:
        """Adds the sectors of one access; inactive lanes repeat an active address of their CTA."""
        sectors = np.sort(address >> np.uint64(5), axis=1)
        changes = sectors[:, 1:] != sectors[:, :-1]
        ctas = len(self.cta_ids)
        if mask is None:
            requests, lanes = ctas, 32 * ctas
            units = ctas + int(np.count_nonzero(changes)) * (ctas // len(sectors))
        else:
            active = np.broadcast_to(mask, (ctas, 32))
            rows = active.any(axis=1)
            requests, lanes = int(rows.sum()), int(active.sum())
            units = int(((1 + changes.sum(axis=1)) * rows).sum())
        self.counters.global_memory[index].add(requests, units, -(-lanes * size // 32), lanes * size)

    # -- running

    def run(self) -> None:
        """Runs all CTAs to their end.

        Raises:
            EmulatorError: whatever is wrong with the kernel.
        """
        while True:
            ran = [self._advance(warp) for warp in self.warps if warp.ready]
            opened = [self._open(barrier) for barrier in self.barriers.values() if barrier.waiting]
            if not any(opened) and not any(warp.ready for warp in self.warps):
                if any(barrier.waiting for barrier in self.barriers.values()):
                    raise self._deadlock()
                return
            assert ran or any(opened)

    def _advance(self, warp: Warp) -> None:
        """Runs a warp until all its lanes wait or have left."""
        program, counts, ready = self.program, self.counters.blocks, warp.ready
        while ready:
            index = min(ready)
            mask = ready.pop(index)
            block = program.blocks[index]
            warp.executed += len(block.instructions)
            if warp.executed > self.machine.max_instructions:
                raise self._over_budget(warp, block.last.index)
            counts[index] += len(self.cta_ids) if mask is None else self._active_ctas(mask)
            result = program.functions[index](warp, warp.registers, mask)
            root = block.last.opcode.split(".", 1)[0]
            if root == "bra":
                self._branch(warp, mask, result, block.target, index + 1)
            elif root in ("ret", "exit"):
                self._exit(warp, mask, result, index + 1)
            elif root in ("bar", "barrier") and block.last.opcode != "bar.warp.sync":
                self._arrive(warp, mask, result, index)
            else:
                ready[index + 1] = either(mask, ready[index + 1]) if index + 1 in ready else mask

    def _active_ctas(self, mask: np.ndarray) -> int:
        active = int(mask.any(axis=1).sum())
        return active if mask.shape[0] > 1 else active * len(self.cta_ids)

    def _send(self, warp: Warp, block: int, mask: Mask) -> None:
        warp.ready[block] = either(mask, warp.ready[block]) if block in warp.ready else mask

    def _branch(self, warp: Warp, mask: Mask, taken: Mask, target: int, following: int) -> None:
        if taken is None or taken.all():
            self._send(warp, target, mask)
            return
        there, here = (taken, ~taken) if mask is None else (taken & mask, ~taken & mask)
        if not there.any():
            self._send(warp, following, mask)
        elif not here.any():
            self._send(warp, target, mask)
        else:
            self._send(warp, target, there)
            self._send(warp, following, here)

    def _exit(self, warp: Warp, mask: Mask, leaving: Mask, following: int) -> None:
        gone = leaving if mask is None else mask if leaving is None else mask & leaving
        if leaving is not None:
            staying = ~leaving if mask is None else mask & ~leaving
            if staying.any():
                self._send(warp, following, None if staying.all() else staying)
        if gone is None or gone.all():
            warp.live = np.zeros((1, 1), bool)
        else:
            warp.live = ~gone if warp.live is None else warp.live & ~gone

    # -- barriers

    def _arrive(self, warp: Warp, mask: Mask, operands: tuple, index: int) -> None:
        """Lanes arrive at the barrier that ends block `index`; those that only arrive, or fail the guard, go on."""
        number, threads, guard = operands
        last = self.program.blocks[index].last
        if guard is not None and not guard.all():
            passing = ~guard if mask is None else mask & ~guard
            if passing.any():
                self._send(warp, index + 1, passing)
            mask = guard if mask is None else mask & guard
            if not mask.any():
                return
        aligned = last.opcode.startswith("bar.") or last.opcode.endswith(".aligned")
        if aligned and mask is not None:
            self._check_aligned(warp, mask, last.index)
        for each in np.unique(number).tolist():
            chosen = mask if number.size == 1 else narrow(mask, number == each)
            if chosen is not None and not chosen.any():
                continue
            barrier = self.barriers.setdefault(each, Barrier(each, len(self.cta_ids)))
            self._count_arrival(barrier, chosen, threads, aligned)
            if ".arrive" in last.opcode:
                self._send(warp, index + 1, chosen)
            else:
                barrier.waiting.append(Arrival(warp, index + 1, chosen))
            if self.race:
                self.race.arrive(each, warp.index, self.rows(chosen))

    def _count_arrival(self, barrier: Barrier, mask: Mask, threads: Mask, aligned: bool) -> None:
        """An aligned barrier counts whole warps; otherwise each lane counts."""
        shape = (len(self.cta_ids), 32)
        lanes = np.broadcast_to(True if mask is None else mask, shape)
        arrived = lanes.any(axis=1)
        barrier.arrived += 32 * arrived if aligned else lanes.sum(axis=1)
        total = self.machine.num_threads
        whole = -(-total // 32) * 32 if aligned else total
        expected = whole if threads is None else np.broadcast_to(threads, shape).max(axis=1, where=lanes, initial=0)
        barrier.expected = np.where(arrived, expected, barrier.expected)

    def _check_aligned(self, warp: Warp, mask: np.ndarray, index: int) -> None:
        """All lanes of a warp that have not left must come to an aligned barrier together."""
        live = np.broadcast_to(
            True if warp.live is None else warp.live,
            (mask.shape[0] if warp.live is None else max(mask.shape[0], warp.live.shape[0]), 32),
        )
        missing = mask.any(axis=1)[:, None] & live & ~mask
        if missing.any():
            row = int(np.argmax(missing.any(axis=1)))
            lanes = np.nonzero(np.broadcast_to(missing[row], 32))[0].tolist()
            raise ConvergenceError(
                f"a barrier in divergent code: lanes {lanes} of the warp are elsewhere\n  {warp.at(index, row)}"
            )

    def _open(self, barrier: Barrier) -> bool:
        """Lets the CTAs go on in which everybody has arrived; whether there were any."""
        full = (barrier.arrived >= barrier.expected) & (barrier.arrived > 0)
        if not full.any():
            return False
        everywhere = bool(full.all())
        waiting, barrier.waiting = barrier.waiting, []
        leaving: set[int] = set()
        for arrival in waiting:
            leaves = arrival.mask if everywhere else narrow(arrival.mask, full[:, None])
            if leaves is None or leaves.any():
                leaving.add(arrival.warp.index)
                self._send(arrival.warp, arrival.block, leaves)
            stays = np.zeros((1, 1), bool) if everywhere else narrow(arrival.mask, ~full[:, None])
            if stays is not None and stays.any():
                barrier.waiting.append(Arrival(arrival.warp, arrival.block, stays))
        if self.race:
            self.race.leave(barrier.number, sorted(leaving), None if everywhere else np.nonzero(full)[0])
        barrier.arrived[full] = 0
        return True

    # -- endings

    def _deadlock(self) -> DeadlockError:
        row = min(self._first_row(arrival) for barrier in self.barriers.values() for arrival in barrier.waiting)
        lines = [f"deadlock in CTA {self.cta_name(row)}:"]
        for warp in self.warps:
            state = "has exited"
            for number, barrier in self.barriers.items():
                for arrival in barrier.waiting:
                    if arrival.warp is warp and (
                        arrival.mask is None or arrival.mask[row if arrival.mask.shape[0] > 1 else 0].any()
                    ):
                        last = self.program.blocks[arrival.block - 1].last
                        state = f"waits at barrier {number} ({barrier.arrived[row]} of {barrier.expected[row]} threads), at {last.where()}: `{last.text}`"
            lines.append(f"  warp {warp.index} {state}")
        return DeadlockError("\n".join(lines))

    @staticmethod
    def _first_row(arrival: Arrival) -> int:
        return 0 if arrival.mask is None else int(np.argmax(arrival.mask.any(axis=1)))

    def _over_budget(self, warp: Warp, index: int) -> InstructionBudgetError:
        return InstructionBudgetError(
            f"more than {self.machine.max_instructions} instructions in one warp: an endless loop?\n  {warp.at(index, 0)}"
        )
