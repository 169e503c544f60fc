"""Runs a chunk of CTAs: one warp at a time, each up to a gate where it has to wait; then the gates that can, open.

A warp whose lanes (or CTAs) take different ways keeps, for every block, the mask of the lanes that stand before it.
Lanes wait at a block for those that are sure to come there too, from elsewhere or from a gate: lanes that branched
apart meet again at the branch's immediate post-dominator (Fung et al., MICRO 2007), wherever the compiler has put that
block. PTX leaves the places to the compiler ("Divergence of Threads in Control Constructs"). Among blocks that wait for
no other the lowest runs first.
"""

import time
from collections.abc import Callable

import numpy as np

from ..errors import ConvergenceError, DeadlockError, InstructionBudgetError
from .arrays import Array, Mask, has_lanes, narrow
from .chunk import Chunk, Warp
from .machine import Machine
from .mbarrier import mbarriers_of
from .polls import polls_of
from .register_pool import RegisterPool
from .warp import RunningWarp
from .watcher import Watcher

SECONDS = 1.0  # from one word of where a warp is to the next


class Scheduler:
    """Runs a chunk."""

    def __init__(self, machine: Machine, cta_ids: np.ndarray, watcher_of: Callable[[Chunk], Watcher] | None) -> None:
        """`watcher_of` makes the watcher of a chunk; None: nobody watches."""
        self.machine, self.program, self.counters = machine, machine.program, machine.counters
        self.chunk = Chunk(machine, cta_ids)
        self.gates = self.chunk.gates
        self.mbarriers, self.polls = mbarriers_of(self.chunk), polls_of(self.chunk)  # the first that may open
        self.warps = [RunningWarp(self.chunk, index) for index in range(machine.num_warps)]
        self.chunk.warps = self.warps
        if watcher_of:
            self.chunk.watcher = watcher_of(self.chunk)

    def run(self) -> None:
        """Runs all CTAs to their end.

        Raises:
            EmulatorError: whatever is wrong with the kernel.
        """
        while True:
            moved = [self._advance(warp) for warp in self.warps if warp.ready and not warp.lags]
            moved += [gate.open(stuck=False) for gate in self.gates.values()]
            if not any(moved) and not self._unblock():
                break
        if any(gate.waiting for gate in self.gates.values()):
            raise self._deadlock()
        self._finish()

    def _unblock(self) -> bool:
        """Does the next of what is put off while any warp can go on: a gate opens for some CTAs only, the oldest copy
        in flight lands, a warp that lags goes on as far as its next synchronisation, the lanes of CTAs whose warp is
        together go on, lanes look again at global memory, lanes go on without others of their warp, a test of a barrier
        says no. Whether there was something to do."""
        if any(gate.open(stuck=True) for gate in self.gates.values()):
            return True
        if self.chunk.in_flight and any(gate.waiting for gate in self.gates.values()):
            self.chunk.in_flight.pop(0)()
            return True
        if any(self._advance(warp) for warp in self.warps if warp.ready and warp.lags):
            return True
        if any(self._advance(warp, stuck=True) for warp in self.warps if warp.ready) or self.polls.look_again():
            return True
        try:
            if any(self._advance(warp, stuck=True, alone=True) for warp in self.warps if warp.ready):
                return True
        except ConvergenceError:
            if self.polls.waiting:  # lanes of the warp wait for what does not come
                raise self._deadlock() from None
            raise
        return self.mbarriers.answer_no(self.warps)

    def _finish(self) -> None:
        """What is left to do and to check when all CTAs have ended."""
        for warp in self.warps:
            warp.access.bulk.finish()
        pool = self.gates.get("registers")
        if isinstance(pool, RegisterPool):
            pool.check_all()
        if self.chunk.watcher:
            self.chunk.watcher.check_end()

    def _advance(self, warp: RunningWarp, stuck: bool = False, alone: bool = False) -> bool:
        """Runs a warp until all its lanes wait or have left, or stand where they wait for lanes at a gate; one that
        lags as far as its next synchronisation. Whether any ran. `stuck`: those go on that wait for no lanes of their
        own CTA; `alone`: all do."""
        program, ready, ran = self.program, warp.ready, False
        while ready:
            index = self._next(warp)
            mask = ready.pop(index)
            if mask is not None and not alone and self._awaiting(warp, index, mask).any():
                ready[index] = mask
                if not stuck or (found := self._take_free(warp)) is None:
                    return ran
                index, mask = found
            ran, stuck, alone = True, False, False
            if self.machine.entering:
                self.machine.entering(index)
            block = program.blocks[index]
            if index in program.polls and self.polls.put_aside(warp, index, mask):
                continue
            warp.executed += len(block.instructions)
            self.counters.blocks[index] += len(self.chunk.cta_ids) if mask is None else self._active_ctas(mask)
            if warp.executed > self.machine.max_instructions:
                raise self._endless(warp)
            if self.machine.tell and time.monotonic() - self.machine.said > SECONDS:
                self.machine.said = time.monotonic()
                self.machine.tell(f"warp {warp.index} {block.last.where()}")
            result = program.functions[index](warp, warp.registers, mask)
            if block.ending == "branch":
                self._branch(warp, mask, result, block.target, index + 1)
            elif block.ending == "exit":
                self._exit(warp, mask, result, index + 1)
            elif block.ending == "gate":
                result.enter(self.chunk, warp, mask, index)
            else:
                warp.send(index + 1, mask)
            if warp.lags and block.synchronises:
                break
        return ran

    def _awaiting(self, warp: Warp, block: int, mask: np.ndarray) -> np.ndarray:
        """In which CTAs of a mask lanes of the warp wait at a gate that are sure to come to this block too, (rows)."""
        found = np.zeros(len(mask), bool)
        for gate in self.gates.values():
            for each in gate.waiting:
                if each.warp is warp and (
                    block == each.block or block in self.program.blocks[each.block].post_dominators
                ):
                    found = found | (True if each.mask is None else has_lanes(each.mask) & has_lanes(mask))
        return found

    def _take_free(self, warp: Warp) -> tuple[int, Mask] | None:
        """Takes lanes that may run from before their block: those of CTAs in which none waits at a gate, nor stands
        elsewhere, that is sure to come there too."""
        for block in sorted(warp.ready):
            mask = warp.ready[block]
            if mask is None:
                continue
            waiting = self._awaiting(warp, block, mask)
            for other, lanes in warp.ready.items():
                if block in self.program.blocks[other].post_dominators:
                    waiting = waiting | (True if lanes is None else has_lanes(lanes))
            if not (free := mask & ~waiting[:, None]).any():
                continue
            if (staying := mask & waiting[:, None]).any():
                warp.ready[block] = staying
            else:
                del warp.ready[block]
            return block, free
        return None

    def _endless(self, warp: Warp) -> InstructionBudgetError:
        """Names the end of the block that was executed most: in a loop that never ends, or in one that it repeats."""
        most = max(range(len(self.counters.blocks)), key=lambda index: self.counters.blocks[index])
        return InstructionBudgetError(
            f"more than {self.machine.max_instructions:,} instructions in one warp: an endless loop?\n"
            f"  {warp.at(self.program.blocks[most].last.index, 0)}"
        )

    def _next(self, warp: Warp) -> int:
        """The lowest of the blocks before which lanes stand, but for those that other lanes are yet to come to."""
        ready = warp.ready
        if len(ready) == 1:
            return next(iter(ready))
        to_come = frozenset().union(*(self.program.blocks[index].post_dominators for index in ready))
        return min(index for index in ready if index not in to_come)

    def _active_ctas(self, mask: np.ndarray) -> int:
        active = int(has_lanes(mask).sum())
        return active if len(mask) > 1 else active * len(self.chunk.cta_ids)

    def _branch(self, warp: Warp, mask: Mask, taken: Array | None, target: int, following: int) -> None:
        if taken is None or taken.all():
            warp.send(target, mask)
            return
        there, here = narrow(mask, taken), narrow(mask, ~taken)
        if there.any():
            warp.send(target, there if here.any() else mask)
        if here.any():
            warp.send(following, here if there.any() else mask)

    def _exit(self, warp: Warp, mask: Mask, leaving: Array | None, following: int) -> None:
        gone = mask if leaving is None else narrow(mask, leaving)
        if leaving is not None:
            staying = narrow(mask, ~leaving)
            if staying.any():
                warp.send(following, staying)
        warp.live = np.zeros((1, 1), bool) if gone is None else narrow(warp.live, ~gone)

    def _deadlock(self) -> DeadlockError:
        held = [(gate, each) for gate in self.gates.values() for each in gate.waiting]
        row = next(row for row in range(len(self.chunk.cta_ids)) if any(each.includes(row) for _, each in held))
        lines, instructions = [f"deadlock in CTA {self.chunk.cta_name(row)}:"], self.program.kernel.instructions
        for warp in self.warps:
            states = [
                f"waits at {gate.progress(each, row)}, {instructions[each.stopped_at(self.program.blocks)].described()}"
                for gate, each in held
                if each.warp is warp and each.includes(row)
            ]
            lines.append(f"  warp {warp.index} {' and '.join(states) or 'has left'}")
        return DeadlockError("\n".join(lines))
