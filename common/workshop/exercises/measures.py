"""The figures in which an exercise's goal may be set: of each, less is better.

A solution need not be the rung's, so a goal asks for half of the way from the start to the rung. Where all good
solutions have the same figure, it asks for that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashladder.common.compiler.sass import Code, SassInstruction, count
from flashladder.common.compiler.sass.opcodes import mma
from flashladder.common.emulator import Report

_BARRIERS = re.compile(r"bar(rier)?\.")
_DIVISIONS = re.compile(r"(div|rcp)\.")
_MAXIMA = re.compile(r"max\..*f32$")
_FP32 = re.compile(r"(add|sub|mul|fma)\..*f32$")
_INTEGER = re.compile(r"(add|sub|mul|mad|shl|shr|and|or|xor|cvt|cvta)\..*[usb](16|32|64)$")


@dataclass(frozen=True)
class Measure:
    """A figure of a kernel: its name in words, and who finds it."""

    title: str
    of: Callable[[Report, Code], int]
    is_exact: bool = False  # good solutions have the same figure

    def bound(self, start: int, rung: int) -> int:
        """The most that a solution may have."""
        return rung if self.is_exact else (start + rung) // 2


def _executed(opcodes: re.Pattern[str]) -> Callable[[Report, Code], int]:
    return lambda report, _: sum(times for opcode, times in report.instructions.items() if opcodes.match(opcode))


def without_copies(loop: Sequence[SassInstruction]) -> int:
    """The mmas in one turn of a loop that run while no copy from global memory is under way."""
    groups: list[bool] = []  # committed and not yet waited for: whether there are copies in them
    is_open = False  # whether copies were issued since the last commit
    alone = 0
    for instruction in (*loop, *loop):  # the first turn brings copies under way, the second one counts
        if instruction is loop[0]:
            alone = 0
        if instruction.is_filler:
            continue
        if instruction.base == "LDGSTS":
            is_open = True
        elif instruction.base == "LDGDEPBAR":
            groups, is_open = [*groups, is_open], False
        elif instruction.base == "DEPBAR":
            pending = int(instruction.operands[-1], 16)
            groups = groups[max(0, len(groups) - pending) :]
        elif mma(instruction.opcode):
            alone += not (is_open or any(groups))
    return alone


MEASURES = {
    "bank_conflicts": Measure(
        "wavefronts of shared memory that are bank conflicts",
        lambda report, _: report.shared_wavefronts - report.shared_wavefronts_ideal,
        is_exact=True,
    ),
    "shared_memory": Measure("wavefronts of shared memory", lambda report, _: report.shared_wavefronts),
    "global_memory": Measure("32-byte sectors of global memory", lambda report, _: report.global_sectors),
    "integer": Measure("integer instructions, executed", _executed(_INTEGER)),
    "fp32": Measure("FP32 additions and multiplications, executed", _executed(_FP32)),
    "maxima": Measure("FP32 maxima, executed", _executed(_MAXIMA)),
    "divisions": Measure("divisions and reciprocals, executed", _executed(_DIVISIONS), is_exact=True),
    "barriers": Measure("barriers, executed", _executed(_BARRIERS), is_exact=True),
    "idle_copies": Measure(
        "mmas of the main loop with no copy under way", lambda _, code: without_copies(code.usual_loop)
    ),
    "fp32_in_loop": Measure(
        "FP32 instructions in the main loop", lambda _, code: count(code.loop, ("FADD", "FMUL", "FFMA"))
    ),
    "moves_in_loop": Measure(
        "moves in the main loop", lambda _, code: code.loop_counts["MOV"] + code.loop_counts["IMAD.MOV"]
    ),
    "loop": Measure("instructions in the main loop", lambda _, code: len(code.loop)),
    "registers": Measure("registers of a thread", lambda _, code: code.artifact.registers),
}
