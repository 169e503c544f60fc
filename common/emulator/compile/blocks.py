"""Control flow: basic blocks, liveness of registers, and the static checks that follow from them."""

from collections.abc import Callable, Iterator

from ..errors import PtxSyntaxError
from ..parse.ptx import Address, Instruction, Not, Operand, Pair, PtxKernel, Reg, Symbol, TensorAddress, Vector
from .ops import lookup
from .program import PtxBlock


def registers(operand: Operand) -> Iterator[Reg]:
    """The registers named by an operand."""
    if isinstance(operand, Reg):
        yield operand
    elif isinstance(operand, Vector):
        for item in operand.items:
            yield from registers(item)
    elif isinstance(operand, Address):
        yield from registers(operand.base)
    elif isinstance(operand, TensorAddress):
        yield from registers(operand.map)
        yield from registers(operand.coordinates)
    elif isinstance(operand, Pair):
        yield from registers(operand.first)
        yield from registers(operand.second)
    elif isinstance(operand, Not):
        yield operand.reg


def sources(instruction: Instruction) -> Iterator[Reg]:
    """Registers whose values an instruction uses."""
    for operand in instruction.operands[lookup(instruction)[0].outputs :]:
        yield from registers(operand)
    if instruction.guard:
        yield instruction.guard


def reads(instruction: Instruction) -> Iterator[Reg]:
    """The same, and what a guarded instruction writes: it keeps the old values of the lanes that fail the guard. Of an
    instruction that may add to what it writes, this too."""
    yield from sources(instruction)
    if instruction.guard or lookup(instruction)[0].updates:
        yield from writes(instruction)


def writes(instruction: Instruction) -> Iterator[Reg]:
    """Registers an instruction writes."""
    for operand in instruction.operands[: lookup(instruction)[0].outputs]:
        yield from registers(operand)


def build_blocks(kernel: PtxKernel) -> list[PtxBlock]:
    """Basic blocks in program order, with liveness and post-dominators. Every barrier ends a block, as a warp may have
    to wait there, and every arrival at one, as a warp may be made to lag there.

    Raises:
        UnsupportedInstructionError: an instruction that no family knows.
    """
    program = kernel.instructions
    leaders = {0, *kernel.labels.values()}
    leaders.update(i.index + 1 for i in program if lookup(i)[0].ending or lookup(i)[0].tells)
    starts = sorted(start for start in leaders if start < len(program))
    block_at = {start: index for index, start in enumerate(starts)}
    blocks = [
        PtxBlock(n, program[start:end])
        for n, (start, end) in enumerate(zip(starts, [*starts[1:], len(program)], strict=True))
    ]
    for block in blocks:
        operation, _ = lookup(block.last)
        block.ending, block.synchronises = operation.ending, operation.ending == "gate" or operation.tells
        if block.ending == "branch":
            label = block.last.operands[0]
            assert isinstance(label, Symbol)
            block.target = block_at[kernel.labels[label.name]]
        block.falls_through = block.ending not in ("branch", "exit") or block.last.guard is not None
    if blocks[-1].falls_through:
        raise PtxSyntaxError(f"control runs past the end of {kernel.name}")
    for block, live_in, live_out in zip(blocks, *_liveness(blocks, reads), strict=True):
        block.live_in, block.live_out = live_in, live_out
    for block, post_dominators in zip(blocks, _post_dominators(blocks), strict=True):
        block.post_dominators = post_dominators
    return blocks


def perhaps_unwritten(blocks: list[PtxBlock]) -> frozenset[Reg]:
    """The registers that are used on some way through the blocks on which nothing wrote them, not even under a guard.
    No thread need ever go that way: nvcc keeps ways that only equal conditions, asked twice, rule out."""
    return frozenset(_liveness(blocks, sources)[0][0])


def _liveness(
    blocks: list[PtxBlock], used_by: Callable[[Instruction], Iterator[Reg]]
) -> tuple[list[set[Reg]], list[set[Reg]]]:
    """Registers whose values matter before and after each block."""
    uses: list[set[Reg]] = []
    definitions: list[set[Reg]] = []
    for block in blocks:
        used: set[Reg] = set()
        defined: set[Reg] = set()
        for instruction in block.instructions:
            used.update(reg for reg in used_by(instruction) if reg not in defined)
            defined.update(writes(instruction))
        uses.append(used)
        definitions.append(defined)
    before: list[set[Reg]] = [set() for _ in blocks]
    after: list[set[Reg]] = [set() for _ in blocks]
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            n = block.index
            after[n] = set().union(*(before[successor] for successor in block.successors()))
            live = uses[n] | (after[n] - definitions[n])
            if live != before[n]:
                before[n], changed = live, True
    return before, after


def _post_dominators(blocks: list[PtxBlock]) -> list[frozenset[int]]:
    """The blocks, besides itself, that every way from each block to an exit leads through."""
    found = [frozenset(range(len(blocks)))] * len(blocks)
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            ways = [found[successor] for successor in block.successors()]
            new = frozenset({block.index}).union(frozenset.intersection(*ways) if ways else ())
            if new != found[block.index]:
                found[block.index], changed = new, True
    # Blocks of an endless loop come to each other; none of them is the later one. That also takes each out of its own.
    return [frozenset(n for n in found[index] if index not in found[n]) for index in range(len(blocks))]
