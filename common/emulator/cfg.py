"""Control flow: basic blocks, liveness of registers, and the static checks that follow from them."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from .errors import PtxSyntaxError, UninitialisedRegisterError
from .ops import lookup
from .ptx import Address, Instruction, Kernel, Not, Operand, Pair, Reg, Symbol, Vector


def registers(operand: Operand) -> Iterator[Reg]:
    """The registers named by an operand."""
    if isinstance(operand, Reg):
        yield operand
    elif isinstance(operand, Vector):
        for item in operand.items:
            yield from registers(item)
    elif isinstance(operand, Address):
        yield from registers(operand.base)
    elif isinstance(operand, Pair):
        yield from registers(operand.first)
        yield from registers(operand.second)
    elif isinstance(operand, Not):
        yield operand.reg


def reads(instruction: Instruction) -> Iterator[Reg]:
    """Registers an instruction reads. A guarded write keeps other lanes' old values, so it reads its destination."""
    outputs = lookup(instruction)[0].outputs
    for operand in instruction.operands[0 if instruction.guard else outputs :]:
        yield from registers(operand)
    if instruction.guard:
        yield instruction.guard


def writes(instruction: Instruction) -> Iterator[Reg]:
    """Registers an instruction writes."""
    for operand in instruction.operands[: lookup(instruction)[0].outputs]:
        yield from registers(operand)


@dataclass
class Block:
    """Instructions without a branch in their midst; `last` tells how control leaves it.

    Attributes:
        target: the block a branch goes to, -1 if none.
        falls_through: control can go on to the next block.
        ending: what its last instruction does to control, see ops.registry.Op.
        live_in, live_out: registers whose values matter before and after.
    """

    index: int
    instructions: list[Instruction]
    target: int = -1
    falls_through: bool = True
    ending: str = ""
    live_in: set[Reg] = field(default_factory=set)
    live_out: set[Reg] = field(default_factory=set)

    @property
    def last(self) -> Instruction:
        return self.instructions[-1]

    def successors(self) -> list[int]:
        return [self.target] * (self.target >= 0) + [self.index + 1] * self.falls_through


def build_blocks(kernel: Kernel) -> list[Block]:
    """Basic blocks in program order, with liveness. Every barrier ends a block, as a warp may have to wait there.

    Raises:
        UnsupportedInstructionError: an instruction that no family knows.
        UninitialisedRegisterError: a register may be read before it is written.
    """
    program = kernel.instructions
    leaders = {0, *kernel.labels.values()}
    leaders.update(i.index + 1 for i in program if lookup(i)[0].ending)
    starts = sorted(start for start in leaders if start < len(program))
    block_at = {start: index for index, start in enumerate(starts)}
    blocks = [
        Block(n, program[start:end])
        for n, (start, end) in enumerate(zip(starts, [*starts[1:], len(program)], strict=True))
    ]
    for block in blocks:
        block.ending = lookup(block.last)[0].ending
        if block.ending == "branch":
            label = block.last.operands[0]
            assert isinstance(label, Symbol)
            block.target = block_at[kernel.labels[label.name]]
        block.falls_through = block.ending not in ("branch", "exit") or block.last.guard is not None
    if blocks[-1].falls_through:
        raise PtxSyntaxError(f"control runs past the end of {kernel.name}")
    _find_liveness(blocks)
    _check_entry(kernel, blocks[0])
    return blocks


def _find_liveness(blocks: list[Block]) -> None:
    uses: list[set[Reg]] = []
    definitions: list[set[Reg]] = []
    for block in blocks:
        used: set[Reg] = set()
        defined: set[Reg] = set()
        for instruction in block.instructions:
            used.update(reg for reg in reads(instruction) if reg not in defined)
            defined.update(writes(instruction))
        uses.append(used)
        definitions.append(defined)
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            block.live_out = set().union(*(blocks[s].live_in for s in block.successors()))
            live_in = uses[block.index] | (block.live_out - definitions[block.index])
            if live_in != block.live_in:
                block.live_in, changed = live_in, True


def _check_entry(kernel: Kernel, entry: Block) -> None:
    """A register that is live at the entry is read on some path on which nothing wrote it."""
    for instruction in kernel.instructions if entry.live_in else ():
        for reg in reads(instruction):
            if reg in entry.live_in:
                raise UninitialisedRegisterError(
                    f"register {reg.name} may be read before it is written, {instruction.described()}"
                )
