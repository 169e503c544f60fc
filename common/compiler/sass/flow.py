"""Basic blocks and loops of a kernel, and which loop is the main one, over K and V."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from flashladder.common.compiler.sass.instruction import BYTES, SassInstruction
from flashladder.common.compiler.sass.opcodes import mma, mma_flops

_COPIES = ("LDGSTS", "LDG", "UTMALDG", "UBLKCP")  # from global memory
_ENDS = ("EXIT", "RET", "KILL", "BRX", "JMX")  # after which a warp does not go on to the next instruction


@dataclass(frozen=True)
class SassBlock:
    """Instructions that execute one after the other, and the indices of the blocks that may follow."""

    instructions: tuple[SassInstruction, ...]
    successors: tuple[int, ...]


@dataclass(frozen=True)
class Loop:
    """A natural loop: the blocks from which its head is reached again without leaving it."""

    head: int
    blocks: frozenset[int]

    def __lt__(self, other: Loop) -> bool:
        """Whether it is nested in the other."""
        return self.blocks < other.blocks


@dataclass(frozen=True)
class Tour:
    """The instructions of a warp on its way through a tile of rows of Q."""

    before: tuple[SassInstruction, ...]
    loop: tuple[SassInstruction, ...]  # once
    after: tuple[SassInstruction, ...]
    is_persistent: bool  # it goes on with another tile


@dataclass(frozen=True)
class Graph:
    """The control flow of a kernel; block 0 is its entry. Functions that it calls are not in it."""

    blocks: tuple[SassBlock, ...]

    @classmethod
    def of(cls, instructions: Sequence[SassInstruction]) -> Graph:
        """The graph of the code that is reached from the first instruction."""
        starts = {instructions[0].address}
        for instruction in instructions:
            if _is_jump(instruction) and instruction.target is not None:
                starts.add(instruction.target)
            if _is_jump(instruction) or instruction.base in _ENDS:
                starts.add(instruction.address + BYTES)
        runs: list[list[SassInstruction]] = []
        for instruction in instructions:
            if instruction.address in starts:
                runs.append([])
            runs[-1].append(instruction)
        numbers = {run[0].address: number for number, run in enumerate(runs)}
        blocks = [SassBlock(tuple(run), _successors(run[-1], numbers)) for run in runs]
        return cls(_reachable(blocks))

    def loops(self) -> list[Loop]:
        """All natural loops, in the order of their heads."""
        dominators = self._dominators
        bodies: dict[int, set[int]] = {}
        for tail, block in enumerate(self.blocks):
            for head in block.successors:
                if head in dominators[tail]:
                    bodies.setdefault(head, {head}).update(self._reaching(tail, head))
        return [Loop(head, frozenset(body)) for head, body in sorted(bodies.items())]

    def body(self, loop: Loop) -> list[SassInstruction]:
        """The loop's instructions, by address; those of branches that are seldom taken are among them."""
        return [instruction for number in sorted(loop.blocks) for instruction in self.blocks[number].instructions]

    def main_loop(self) -> list[SassInstruction]:
        """The instructions of the loop over K and V; empty where there is no loop.

        It is the innermost loop with the most tensor-core work (without any: the most FFMA). Of equals, one that copies
        from global memory goes before one that does not, and the shorter, the unmasked one, before the longer. They are
        compared without the branches that are seldom taken (`usual_loop`).
        """
        loop = self._main()
        return self.body(loop) if loop else []

    def usual_loop(self) -> list[SassInstruction]:
        """The same without the branches around neither copies nor products: those rescale what seldom needs it, or hide
        what a mask seldom hides."""
        loop = self._main()
        return self.body(self._usual(loop)) if loop else []

    def tour(self) -> Tour | None:
        """The shortest way of a warp that goes through the main loop; None where there is no loop.

        It begins and ends at the head of the loop around that one, over tiles of rows of Q; without one, at the
        kernel's begin and end. What it leaves out is what a branch may leave out: spinning at a barrier, masks, LSE.
        """
        main = self._main()
        if main is None:
            return None
        around = min((loop for loop in self.loops() if main < loop), key=lambda loop: len(loop.blocks), default=None)
        inside = around.blocks if around else frozenset(range(len(self.blocks)))
        exits = {after for number in main.blocks for after in self.blocks[number].successors} - main.blocks
        if around:
            ends = {number for number in inside if around.head in self.blocks[number].successors}
        else:
            ends = {number for number in inside if not self.blocks[number].successors}
        before = self._way({around.head if around else 0}, {main.head}, inside)[:-1]
        after = self._way(exits & inside, ends, inside - main.blocks)
        usual = self.body(self._usual(main))
        return Tour(self._instructions(before), tuple(usual), self._instructions(after), around is not None)

    def _way(self, starts: Iterable[int], ends: Collection[int], inside: Collection[int]) -> list[int]:
        """The blocks on the way from a start to an end with the fewest instructions; empty where there is none."""
        waiting: list[tuple[int, tuple[int, ...]]] = []
        for start in starts:
            waiting.append((len(self.blocks[start].instructions), (start,)))
        seen: set[int] = set()
        heapq.heapify(waiting)
        while waiting:
            length, way = heapq.heappop(waiting)
            if way[-1] in ends:
                return list(way)
            if way[-1] in seen:
                continue
            seen.add(way[-1])
            for following in self.blocks[way[-1]].successors:
                if following in inside:
                    heapq.heappush(waiting, (length + len(self.blocks[following].instructions), (*way, following)))
        return []

    def _instructions(self, numbers: Iterable[int]) -> tuple[SassInstruction, ...]:
        return tuple(instruction for number in numbers for instruction in self.blocks[number].instructions)

    def _main(self) -> Loop | None:
        bodies = {loop: self.body(loop) for loop in self.loops()}
        work = {loop: sum(mma_flops(i.opcode) for i in body) for loop, body in bodies.items()}
        if not any(work.values()):
            work = {loop: sum(i.base == "FFMA" for i in body) for loop, body in bodies.items()}
        innermost = [loop for loop in bodies if not any(work[inner] for inner in bodies if inner < loop)]
        copies = {loop: any(i.base in _COPIES for i in bodies[loop]) for loop in innermost}
        usual = {loop: len(self.body(self._usual(loop))) for loop in innermost}
        return max(innermost, key=lambda loop: (work[loop], copies[loop], -usual[loop]), default=None)

    def _usual(self, loop: Loop) -> Loop:
        """The loop without its blocks that some rounds leave out, and that neither copy nor multiply."""
        dominators = self._dominators
        always = set.intersection(*(dominators[n] for n in loop.blocks if loop.head in self.blocks[n].successors))
        has_warpgroup_products = any(map(_is_warpgroup_product, self.body(loop)))
        is_work = _is_warpgroup_work if has_warpgroup_products else _is_work
        seldom = {n for n in loop.blocks - always if not any(map(is_work, self.blocks[n].instructions))}
        return Loop(loop.head, loop.blocks - seldom)

    @cached_property
    def _dominators(self) -> list[set[int]]:
        """For every block, the blocks that every way to it passes."""
        everything = set(range(len(self.blocks)))
        found = [{0}] + [everything for _ in self.blocks[1:]]
        predecessors = self._predecessors()
        changed = True
        while changed:
            changed = False
            for number in range(1, len(self.blocks)):
                new = {number}.union(set.intersection(*(found[p] for p in predecessors[number])))
                changed |= new != found[number]
                found[number] = new
        return found

    def _reaching(self, tail: int, head: int) -> set[int]:
        """The blocks from which `tail` is reached without passing `head`, itself included."""
        predecessors = self._predecessors()
        seen, waiting = {head}, [tail]
        while waiting:
            number = waiting.pop()
            if number not in seen:
                seen.add(number)
                waiting.extend(predecessors[number])
        return seen

    def _predecessors(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.blocks]
        for number, block in enumerate(self.blocks):
            for successor in block.successors:
                found[successor].append(number)
        return found


def _is_jump(instruction: SassInstruction) -> bool:
    """Whether control may go to the label in the instruction. The compiler also jumps with a CALL to a plain label."""
    if instruction.base == "CALL":
        return any("`(.L_" in operand for operand in instruction.operands)
    return instruction.base == "BRA"


def _successors(last: SassInstruction, numbers: dict[int, int]) -> tuple[int, ...]:
    following = numbers.get(last.address + BYTES)
    goes_on = [] if following is None else [following]
    if _is_jump(last):
        target = [] if last.target is None else [numbers[last.target]]
        is_conditional = bool(last.guard) or len(last.operands) > 1  # `BRA UP0, label` takes its predicate as operand
        return tuple(dict.fromkeys(target + (goes_on if is_conditional else [])))
    if last.base in _ENDS and not last.guard:
        return ()
    return tuple(goes_on)


def _reachable(blocks: Sequence[SassBlock]) -> tuple[SassBlock, ...]:
    """The blocks that are reached from the first, renumbered."""
    seen, waiting = {0}, [0]
    while waiting:
        for successor in blocks[waiting.pop()].successors:
            if successor not in seen:
                seen.add(successor)
                waiting.append(successor)
    numbers = {old: new for new, old in enumerate(sorted(seen))}
    return tuple(
        SassBlock(blocks[old].instructions, tuple(numbers[successor] for successor in blocks[old].successors))
        for old in sorted(seen)
    )


def _is_work(instruction: SassInstruction) -> bool:
    return instruction.base in (*_COPIES, "LDSM") or mma_flops(instruction.opcode) > 0


def _is_warpgroup_work(instruction: SassInstruction) -> bool:
    """In a loop of warpgroup products, what one warp multiplies by itself is an exception."""
    return instruction.base in _COPIES or _is_warpgroup_product(instruction)


def _is_warpgroup_product(instruction: SassInstruction) -> bool:
    operation = mma(instruction.opcode)
    return bool(operation and operation.is_warpgroup)
