"""Live registers: how many values a thread must keep at each instruction.

nvdisasm counts them too (-plr), but refuses kernels of 255 registers, which are the ones of interest.
"""

from __future__ import annotations

import re

from flashladder.common.compiler.sass.flow import Graph
from flashladder.common.compiler.sass.instruction import SassInstruction
from flashladder.common.compiler.sass.opcodes import access_width, mma

_REGISTER = re.compile(r"(?<![A-Z])R(\d+)(\.64)?")
_PREDICATE = re.compile(r"!?U?P(\d|T)$")
_STORES = ("ST", "STG", "STS", "STL", "STSM", "LDGSTS", "RED", "REDUX")
_CONTROL = ("BRA", "BAR", "RET", "CALL", "EXIT", "WARPSYNC", "CCTL", "SYNCS", "BMOV", "NANOSLEEP", "DEPBAR")
_TO_OTHER_REGISTERS = ("ISETP", "FSETP", "DSETP", "HSETP2", "PSETP", "PLOP3", "R2P", "R2UR")
_NO_RESULT = frozenset((*_STORES, *_CONTROL, *_TO_OTHER_REGISTERS))  # in a general register


def live_registers(graph: Graph) -> dict[int, int]:
    """The number of live general registers at each instruction, by address; its operands and results are among them."""
    kept_in, kept_out = _live_at_blocks(graph)
    counts = {}
    for number, block in enumerate(graph.blocks):
        live = set(kept_out[number])
        for instruction in reversed(block.instructions):
            results, operands = results_of(instruction), operands_of(instruction)
            counts[instruction.address] = len(live | results | operands)
            if not instruction.guard:
                live -= results
            live |= operands
        assert live == kept_in[number]
    return counts


def results_of(instruction: SassInstruction) -> set[int]:
    """The registers that it writes."""
    result, _ = _parts(instruction)
    match = _REGISTER.match(result)
    return _span(match, result_width(instruction)) if match else set()


def operands_of(instruction: SassInstruction) -> set[int]:
    """The registers that it reads."""
    _, operands = _parts(instruction)
    read: set[int] = set()
    for position, operand in enumerate(operands):
        width = 1 if "[" in operand else operand_width(instruction, position)  # an address says itself how wide it is
        for match in _REGISTER.finditer(operand):
            read |= _span(match, width)
    return read


def _parts(instruction: SassInstruction) -> tuple[str, list[str]]:
    """The result (empty where it is none or a predicate) and the operands; predicates are left out."""
    if instruction.is_filler:
        return "", []
    operands = [operand for operand in instruction.operands if not _PREDICATE.match(operand)]
    if instruction.base in _NO_RESULT or not operands:
        return "", operands
    return operands[0], operands[1:]


def _span(match: re.Match[str], width: int) -> set[int]:
    first = int(match[1])
    return set(range(first, first + (2 if match[2] else width)))


def result_width(instruction: SassInstruction) -> int:
    """32-bit registers of the result."""
    if operation := mma(instruction.opcode):
        return operation.result
    if instruction.base == "CS2R":
        return 1 if "32" in instruction.modifiers else 2
    if instruction.base == "IMAD" and "WIDE" in instruction.modifiers:
        return 2
    return access_width(instruction.opcode)


def operand_width(instruction: SassInstruction, position: int) -> int:
    """32-bit registers of an operand that is no address; `position` counts from the first after the result."""
    if operation := mma(instruction.opcode):
        if position == 0:
            return operation.a
        return operation.b if position == 1 and not operation.is_warpgroup else operation.result
    if instruction.base.startswith("ST"):
        return access_width(instruction.opcode)
    return 2 if instruction.base == "IMAD" and "WIDE" in instruction.modifiers and position == 2 else 1


def _live_at_blocks(graph: Graph) -> tuple[list[set[int]], list[set[int]]]:
    """The registers that are live before and after each block."""
    reads, writes = zip(*(_reads_and_writes(block.instructions) for block in graph.blocks), strict=True)
    before: list[set[int]] = [set() for _ in graph.blocks]
    after: list[set[int]] = [set() for _ in graph.blocks]
    changed = True
    while changed:
        changed = False
        for number in reversed(range(len(graph.blocks))):
            after[number] = set().union(*(before[successor] for successor in graph.blocks[number].successors))
            new = reads[number] | (after[number] - writes[number])
            changed |= new != before[number]
            before[number] = new
    return before, after


def _reads_and_writes(instructions: tuple[SassInstruction, ...]) -> tuple[set[int], set[int]]:
    """What a block reads before it writes it, and what it writes whatever happens."""
    reads: set[int] = set()
    writes: set[int] = set()
    for instruction in instructions:
        reads |= operands_of(instruction) - writes
        if not instruction.guard:
            writes |= results_of(instruction)
    return reads, writes
