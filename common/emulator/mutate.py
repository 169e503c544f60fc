"""Proof that the race detector sees what it should: take one synchronisation out of a kernel and run it again."""

import re
from collections.abc import Iterator

from .codegen import Program
from .ptx import Instruction

_SYNCHRONISES = re.compile(r"(bar|barrier)\.|cp\.async\.(commit_group|wait_group|wait_all)$")


def synchronisations(program: Program) -> Iterator[Instruction]:
    """Every barrier (also of a warp), commit and wait of asynchronous copies, in program order; see codegen.without."""
    for instruction in program.kernel.instructions:
        if _SYNCHRONISES.match(instruction.opcode):
            yield instruction
