"""Proof that the race detector sees what it should: take one synchronisation out of a kernel and run it again."""

import re
from collections.abc import Iterator
from dataclasses import replace

from .codegen import Program, substitute
from .ptx import Imm, Instruction

_SYNCHRONISES = re.compile(
    r"(bar|barrier)\.|cp\.async\.(commit_group|wait_group|wait_all)$|wgmma\.(fence|commit_group|wait_group)\."
)


def synchronisations(program: Program) -> Iterator[Instruction]:
    """Every barrier (also of a warp), commit and wait of asynchronous work, and fence of wgmma, in program order."""
    for instruction in program.kernel.instructions:
        if _SYNCHRONISES.match(instruction.opcode):
            yield instruction


def without(program: Program, instruction: Instruction) -> Program:
    """The same program less one synchronisation. Of a bar.red its value stays, as if each thread were alone."""
    return substitute(program, instruction, [_alone(instruction)] if ".red." in instruction.opcode else [])


def _alone(reduction: Instruction) -> Instruction:
    """What a bar.red gives to a thread that meets no other."""
    target, predicate = reduction.operands[0], reduction.operands[-1]
    if ".popc" in reduction.opcode:
        return replace(reduction, opcode="selp.u32", operands=(target, Imm(1), Imm(0), predicate))
    return replace(reduction, opcode="mov.pred", operands=(target, predicate))
