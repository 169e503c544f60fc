"""Branches, exits and barriers (PTX ISA, "Control Flow" and "Parallel Synchronization Instructions").

Each ends its block; the scheduler acts on the result of the block's function. A barrier is a gate: its function returns
(barrier, threads) and the scheduler lets the lanes go on when it opens. Other gates, such as an mbarrier's try_wait,
return their object in the same way, so that a spin-wait is never executed as a spin.
"""

from typing import TYPE_CHECKING

from ..ptx import Instruction
from .registry import Match, op

if TYPE_CHECKING:
    from ..codegen import BlockEmitter


@op(r"bra(?:\.uni)?", outputs=0, ending="branch")
def branch(e: "BlockEmitter", i: Instruction, m: Match) -> None:
    _return_guard(e, i)


@op(r"(ret|exit)(?:\.uni)?", outputs=0, ending="exit")
def leave(e: "BlockEmitter", i: Instruction, m: Match) -> None:
    _return_guard(e, i)


@op(r"trap", outputs=0, ending="exit")
def trap(e: "BlockEmitter", i: Instruction, m: Match) -> None:
    e.line(f"w.trap({i.index}, m)")


def _return_guard(e: "BlockEmitter", i: Instruction) -> None:
    if i.guard:
        guard = e.read(i.guard, "pred")
        e.result = f"~{guard}" if i.guard_negated else guard


@op(r"(?:bar|barrier)(?:\.cta)?\.(?P<f>sync|arrive)(?P<aligned>\.aligned)?", outputs=0, ending="barrier")
def barrier(e: "BlockEmitter", i: Instruction, m: Match) -> None:
    number = e.read(i.operands[0], "u32")
    threads = e.read(i.operands[1], "u32") if len(i.operands) > 1 else "None"
    guard = e.read(i.guard, "pred") if i.guard else "None"
    e.result = f"({number}, {threads}, {'~' if i.guard_negated else ''}{guard})"
