"""Registers of products in flight: a static check, as a wrong use of them need not show in the numbers.

PTX ISA, 9.7.15.7: nobody may touch an accumulator of a wgmma.mma_async, nor the registers of its A, before a
wgmma.wait_group that covers it; a wgmma.fence comes before the first wgmma.mma_async, and between any access of a
thread to such a register and the next product that uses it. Products of one shape may follow each other on one
accumulator without either; several may read the same A.

The check follows every way through the blocks. A group counts as waited for if it is on all ways.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..errors import RaceError
from ..parse.ptx import Imm, Instruction, Reg, Vector
from .blocks import reads, registers, writes
from .program import PtxBlock

_UNCOMMITTED = -1
_OLDEST = 8  # groups; wait_group takes at most 7


@dataclass
class _State:
    """What holds before an instruction on at least one way to it.

    Attributes:
        flying: for each register, the products in flight that use it, and how many groups were committed after theirs.
        touched: the last ordinary access to a register since the last fence.
        fenced: a fence has come, on every way.
    """

    flying: dict[Reg, dict[int, int]] = field(default_factory=dict)
    touched: dict[Reg, int] = field(default_factory=dict)
    fenced: bool = False

    def copy(self) -> "_State":
        return _State({reg: dict(ages) for reg, ages in self.flying.items()}, dict(self.touched), self.fenced)

    def join(self, other: "_State") -> bool:
        """Adds what holds on another way; whether that was news."""
        before = self._size()
        for reg, ages in other.flying.items():
            own = self.flying.setdefault(reg, {})
            for index, age in ages.items():
                own[index] = min(age, own.get(index, age))
        for reg, index in other.touched.items():
            self.touched.setdefault(reg, index)
        self.fenced = self.fenced and other.fenced
        return before != self._size()

    def _size(self) -> tuple[bool, int, int]:
        """Grows, but for `fenced`, with everything that may hold."""
        ages = [_OLDEST + 1 - age for ages in self.flying.values() for age in ages.values()]
        return self.fenced, len(self.touched), sum(ages)


def is_product(instruction: Instruction) -> bool:
    """Whether it is a wgmma.mma_async."""
    return instruction.opcode.startswith("wgmma.mma_async")


def accumulators(product: Instruction) -> set[Reg]:
    """The registers of D."""
    return set(registers(product.operands[0]))


def fragments(product: Instruction) -> set[Reg]:
    """The registers of A, if it lies in registers."""
    return set(registers(product.operands[1])) if isinstance(product.operands[1], Vector) else set()


def check_products(blocks: list[PtxBlock]) -> None:
    """Raises RaceError if a register of a product in flight may be touched, or a fence may be missing before one."""
    products = {i.index: i for block in blocks for i in block.instructions if is_product(i)}
    if not products:
        return
    check = _InFlightCheck(products, {i.index: i for block in blocks for i in block.instructions})
    steps = [[step for i in block.instructions if (step := check.relevant(i))] for block in blocks]
    entry: dict[int, _State] = {0: _State()}
    todo = [0]
    while todo:
        index = todo.pop()
        state = entry[index].copy()
        for instruction, touched in steps[index]:
            check.advance(state, instruction, touched)
        for successor in blocks[index].successors():
            if successor not in entry:
                entry[successor] = state.copy()
            elif not entry[successor].join(state):
                continue
            todo.append(successor)
    for index in sorted(entry):
        for instruction, touched in steps[index]:
            check.require(entry[index], instruction, touched)
            check.advance(entry[index], instruction, touched)


def concern_products(instructions: Sequence[Instruction], blocks: list[PtxBlock]) -> bool:
    """Whether what check_products finds of these blocks may depend on some instructions, of these blocks or not."""
    if any(i.opcode.startswith("wgmma.") for i in instructions):
        return True
    products = [i for block in blocks for i in block.instructions if is_product(i)]
    operands = set[Reg]().union(*map(accumulators, products), *map(fragments, products))
    return any(reg in operands for i in instructions for reg in _touches(i))


class _InFlightCheck:
    def __init__(self, products: dict[int, Instruction], instructions: dict[int, Instruction]) -> None:
        self.products, self.instructions = products, instructions
        self.accumulators = {index: accumulators(product) for index, product in products.items()}
        self.fragments = {index: fragments(product) for index, product in products.items()}
        self.operands = set().union(*self.accumulators.values(), *self.fragments.values())

    def relevant(self, instruction: Instruction) -> tuple[Instruction, list[Reg]] | None:
        """An instruction with the operands of products that it touches; None if it has nothing to do with them."""
        if instruction.opcode.startswith("wgmma."):
            return instruction, []
        touched = dict.fromkeys(reg for reg in _touches(instruction) if reg in self.operands)
        return (instruction, list(touched)) if touched else None

    def advance(self, state: _State, instruction: Instruction, touched: list[Reg]) -> None:
        """What holds after an instruction."""
        kind = instruction.opcode.split(".")[1] if instruction.opcode.startswith("wgmma.") else ""
        if kind == "mma_async":
            for reg in self.accumulators[instruction.index] | self.fragments[instruction.index]:
                state.flying.setdefault(reg, {})[instruction.index] = _UNCOMMITTED
        elif kind == "fence":
            state.touched, state.fenced = {}, True
        elif kind == "commit_group":
            for ages in state.flying.values():
                ages.update((index, min(age + 1, _OLDEST)) for index, age in ages.items())
        elif kind == "wait_group":
            allowed = instruction.operands[0]
            assert isinstance(allowed, Imm)
            state.flying = {
                reg: left
                for reg, ages in state.flying.items()
                if (left := {index: age for index, age in ages.items() if age < allowed.value})
            }
        for reg in touched:
            state.touched[reg] = instruction.index

    def require(self, state: _State, instruction: Instruction, touched: list[Reg]) -> None:
        """Raises if the instruction comes too early."""
        for reg in touched:
            for index in state.flying.get(reg, ()):
                raise self._in_flight(reg, index, instruction)
        if not is_product(instruction):
            return
        own, own_a = self.accumulators[instruction.index], self.fragments[instruction.index]
        for reg in sorted(own | own_a, key=lambda reg: reg.name):
            for index in state.flying.get(reg, ()):
                both_sum = reg in own and reg in self.accumulators[index]
                both_read = reg in own_a and reg in self.fragments[index]
                if not (both_read or (both_sum and _shape(instruction) == _shape(self.products[index]))):
                    raise self._in_flight(reg, index, instruction)
            if reg in state.touched:
                raise RaceError(
                    f"no wgmma.fence orders an access to register {reg.name} before the wgmma that uses it\n"
                    f"  uses it: {instruction.described()}\n"
                    f"  accessed it before: {self.instructions[state.touched[reg]].described()}\n"
                    "  mend: wgmma.fence between the two"
                )
        if not state.fenced:
            raise RaceError(
                f"no wgmma.fence comes before the first wgmma\n  {instruction.described()}\n"
                "  mend: wgmma.fence before it"
            )

    def _in_flight(self, reg: Reg, index: int, instruction: Instruction) -> RaceError:
        what = "an accumulator" if reg in self.accumulators[index] else "a fragment of A"
        return RaceError(
            f"register {reg.name} is {what} of a wgmma that may still be under way: no wgmma.wait_group that covers "
            f"it lies between\n  touches it: {instruction.described()}\n  started: {self.products[index].described()}\n"
            "  mend: wgmma.commit_group after the products, and a wgmma.wait_group for it between the two"
        )


def _touches(instruction: Instruction) -> Iterator[Reg]:
    yield from writes(instruction)
    yield from reads(instruction)


def _shape(product: Instruction) -> str:
    """m64n128k16 of the opcode."""
    return product.opcode.split(".")[4]
