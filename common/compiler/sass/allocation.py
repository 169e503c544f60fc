"""Whether two listings of the same instructions do the same with their values, whatever registers these are kept in.

From the first instruction on, along every way through the kernel, it is noted which register of the one side has the
value that a register of the other side has. An instruction that reads must read values that correspond.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from flashladder.common.compiler.sass.flow import Graph, SassBlock
from flashladder.common.compiler.sass.instruction import SassInstruction
from flashladder.common.compiler.sass.registers import operand_width, result_width

_REGISTER = re.compile(r"(?<![\w.])(UR|UP|R|P|B)(\d+)(\.64)?")
_IS_PREDICATE = re.compile(r"!?U?P(\d|T)$")
_IS_REGISTER = re.compile(r"U?R(Z|\d+)(\.64)?$")
_STORES = ("ST", "STG", "STS", "STL", "STSM", "LDGSTS", "RED", "UTMASTG", "UTMALDG", "UTMAPF", "UBLKCP", "UTMAREDG")
_CONTROL = ("BRA", "BAR", "RET", "CALL", "EXIT", "WARPSYNC", "CCTL", "NANOSLEEP", "DEPBAR", "BSYNC", "BREAK")
_WITHOUT_RESULT = frozenset((*_STORES, *_CONTROL))
_ONE_RESULT = ("VOTE", "VOTEU")  # what follows their predicate is read
_ALL_PREDICATES = [("P", number) for number in range(7)]

Register = tuple[str, int]  # "R", 24


@dataclass
class _Correspondence:
    """The right side's register for each of the left side's; None where that differs by the way to the place."""

    to_right: dict[Register, Register | None] = field(default_factory=dict)

    def copy(self) -> _Correspondence:
        return _Correspondence(dict(self.to_right))

    def reads(self, left: Register, right: Register) -> bool:
        """Whether both have the same value; registers that nothing has written yet are taken for the same."""
        return self.to_right.setdefault(left, right) == right

    def writes(self, left: Register, right: Register) -> None:
        for other, kept_in in self.to_right.items():
            if kept_in == right:
                self.to_right[other] = None  # it is overwritten
        self.to_right[left] = right

    def joined(self, other: _Correspondence) -> _Correspondence:
        """What holds on both ways to a place; a register that one of them never wrote is as the other has it."""
        both = self.to_right | other.to_right
        agreed = {left: right if self.to_right.get(left, right) == right else None for left, right in both.items()}
        return _Correspondence(agreed)


def first_exchange(left: Sequence[SassInstruction], right: Sequence[SassInstruction]) -> int | None:
    """The index of the first instruction that reads another value than its partner; None where there is none.

    The listings are the same but for the numbers of registers. Each function is looked at by itself.
    """
    rest = list(range(len(left)))
    wrong: set[int] = set()
    while rest:
        graphs = [Graph.of([side[number] for number in rest]) for side in (left, right)]
        wrong |= _exchanges(*graphs)
        reached = {instruction.address for block in graphs[0].blocks for instruction in block.instructions}
        rest = [number for number in rest if left[number].address not in reached]
    return next((number for number, each in enumerate(left) if each.address in wrong), None)


def _exchanges(left: Graph, right: Graph) -> set[int]:
    """Addresses of instructions that read other values, the first of each block."""
    pairs = list(zip(left.blocks, right.blocks, strict=True))
    at_begin: dict[int, _Correspondence] = {0: _Correspondence()}
    waiting = [0]
    while waiting:
        number = waiting.pop()
        here = at_begin[number].copy()
        _pass_through(pairs[number], here)
        for successor in left.blocks[number].successors:
            known = at_begin.get(successor)
            new = known.joined(here) if known else here
            if known is None or new != known:
                at_begin[successor] = new.copy()
                waiting.append(successor)
    found = (_pass_through(pairs[number], begin) for number, begin in at_begin.items())
    return {address for address in found if address is not None}


def _pass_through(pair: tuple[SassBlock, SassBlock], kept: _Correspondence) -> int | None:
    """Goes on through a block; the address of the first instruction that reads another value."""
    wrong = None
    for left, right in zip(*(block.instructions for block in pair), strict=True):
        (written, read), (to, of) = _registers(left), _registers(right)
        same = [kept.reads(*each) for each in zip(read, of, strict=True)]
        if wrong is None and not all(same):
            wrong = left.address
        for each in zip(written, to, strict=True):
            kept.writes(*each)
    return wrong


def _registers(instruction: SassInstruction) -> tuple[list[Register], list[Register]]:
    """What it writes and what it reads, in the order of its operands."""
    if instruction.is_filler:
        return [], []
    results = _results(instruction)
    read = _span(instruction.guard, 1)
    written: list[Register] = [*_ALL_PREDICATES] if instruction.base == "R2P" else []
    position = 0  # among the operands that are no predicates, from the first after the result
    for number, operand in enumerate(instruction.operands):
        is_predicate = bool(_IS_PREDICATE.match(operand))
        if number < results:
            written += _span(operand, 1 if is_predicate else _width_of_result(instruction))
            continue
        read += _span(operand, 1 if "[" in operand or is_predicate else operand_width(instruction, position))
        position += not is_predicate
    return written, read


def _results(instruction: SassInstruction) -> int:
    """How many of its operands, from the first on, it writes."""
    first, second = (*instruction.operands, "", "")[:2]
    is_predicate = bool(_IS_PREDICATE.match(first))
    if instruction.base in _WITHOUT_RESULT or not (is_predicate or _IS_REGISTER.match(first) or _REGISTER.match(first)):
        return 0
    if instruction.base in _ONE_RESULT or second.startswith("!"):
        return 1
    has_second = _IS_PREDICATE.match(second) or (is_predicate and _IS_REGISTER.match(second))
    return 2 if has_second else 1


def _width_of_result(instruction: SassInstruction) -> int:
    return 2 if "WIDE" in instruction.modifiers else result_width(instruction)


def _span(operand: str, width: int) -> list[Register]:
    """The registers that an operand names, each the first of `width`."""
    return [
        (match[1], int(match[2]) + offset)
        for match in _REGISTER.finditer(operand)
        for offset in range(2 if match[3] else width)
    ]
