"""Branches, exits and barriers (PTX ISA, "Control Flow" and "Parallel Synchronization Instructions").

Each ends its block; the scheduler acts on the result of the block's function. A barrier is a gate: its function returns
a BarrierCall, and the lanes go on when the barrier opens.
"""

from collections.abc import Sequence

from ...parse.ptx import Instruction, Operand, Reg
from ..emitter import BlockEmitter
from .registry import Match, op


@op(r"bra(?:\.uni)?", outputs=0, ending="branch")
def branch(e: BlockEmitter, i: Instruction, m: Match) -> None:
    _return_guard(e, i)


@op(r"(ret|exit)(?:\.uni)?", outputs=0, ending="exit")
def leave(e: BlockEmitter, i: Instruction, m: Match) -> None:
    _return_guard(e, i)


@op(r"trap", outputs=0, ending="exit")
def trap(e: BlockEmitter, i: Instruction, m: Match) -> None:
    e.line(f"w.trap({i.index}, m)")


def _return_guard(e: BlockEmitter, i: Instruction) -> None:
    if i.guard:
        guard = e.read(i.guard, "pred")
        e.result = f"~{guard}" if i.guard_negated else guard


_BARRIER = r"(?:bar|barrier)(?:\.cta)?"


@op(rf"{_BARRIER}\.(?:sync|arrive)(?:\.aligned)?", outputs=0, ending="gate")
def barrier(e: BlockEmitter, i: Instruction, m: Match) -> None:
    _return_call(e, i, i.operands, "")


@op(rf"{_BARRIER}\.red\.(?P<f>and|or|popc)(?:\.aligned)?\.(?:pred|u32)", ending="gate")
def barrier_reduction(e: BlockEmitter, i: Instruction, m: Match) -> None:
    """The target is written when the barrier opens, by the scheduler."""
    target, *operands, predicate = i.operands
    assert isinstance(target, Reg)
    reduction = f", {m['f']!r}, {e.read(predicate, 'pred')}, {e.slots[target]}"
    _return_call(e, i, operands, reduction)


def _return_call(e: BlockEmitter, i: Instruction, operands: Sequence[Operand], reduction: str) -> None:
    number = e.read(operands[0], "u32")
    threads = e.read(operands[1], "u32") if len(operands) > 1 else "None"
    guard = e.read(i.guard, "pred") if i.guard else "None"
    e.result = f"BarrierCall({number}, {threads}, {'~' if i.guard_negated else ''}{guard}{reduction})"
