"""The one table of instructions: a family registers a pattern of full opcodes and the function that emits their code.

A pattern spells out every modifier that is understood, so an unknown modifier is an unknown instruction and raises.
A new family (wgmma, TMA copies, mbarrier) is one more module of this package that registers itself.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from ...errors import UnsupportedInstructionError
from ...parse.ptx import Instruction
from ..emitter import BlockEmitter

Match = re.Match[str]
Emit = Callable[[BlockEmitter, Instruction, Match], None]


@dataclass(frozen=True)
class Op:
    """How one family of instructions is executed.

    Attributes:
        emit: appends the Python code of one instruction to a block.
        outputs: how many leading operands are written.
        ending: what becomes of control: "" goes on; "branch", "exit" and "gate" (a warp may have to wait) end a block,
            and the scheduler acts on what the block's function returns.
        tells: what it does may let other warps go on: it ends a block too, so that a warp may be stopped behind it.
        updates: what it writes it may also read, as a sum; that is no use of a register that nobody has written.
    """

    emit: Emit
    outputs: int
    ending: str
    updates: bool = False
    tells: bool = False


_PATTERNS: dict[str, list[tuple[str, Op]]] = {}  # by the first word
_KNOWN: dict[str, tuple[Op, Match]] = {}


def op(
    pattern: str, outputs: int = 1, ending: str = "", updates: bool = False, tells: bool = False
) -> Callable[[Emit], Emit]:
    """Registers an emit function for the opcodes that `pattern` matches whole; it begins with the first word."""
    roots = re.match(r"\w+|\((?:\?P<\w+>|\?:)?([\w|]+)\)", pattern)
    assert roots, pattern

    def register(emit: Emit) -> Emit:
        for root in (roots[1] or roots[0]).split("|"):
            _PATTERNS.setdefault(root, []).append((pattern, Op(emit, outputs, ending, updates, tells)))
        return emit

    return register


def alu(
    pattern: str, sources: str | None = None, result: str | None = None
) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Registers an instruction without side effects: the function maps source expressions to the result's expression.

    The function takes the match of the pattern, then one Python expression per source operand. Operands are read as
    type `sources` (by default the pattern's group `t`), the result is written as `result` (by default `sources`).
    """

    def register(expression: Callable[..., str]) -> Callable[..., str]:
        def emit(e: BlockEmitter, i: Instruction, m: Match) -> None:
            source_type = sources or m["t"]
            values = [e.read(operand, source_type) for operand in i.operands[1:]]
            e.write(i.operands[0], expression(m, *values), result or source_type)

        op(pattern)(emit)
        return expression

    return register


def lookup(instruction: Instruction) -> tuple[Op, Match]:
    """The operation of an instruction and the match that holds its modifiers.

    Raises:
        UnsupportedInstructionError: no family knows this opcode with these modifiers.
    """
    opcode = instruction.opcode
    found = _KNOWN.get(opcode)
    if found is None:
        for pattern, operation in _PATTERNS.get(opcode.split(".", 1)[0], ()):
            if match := re.fullmatch(pattern, opcode):
                found = _KNOWN[opcode] = operation, match
                break
        else:
            raise UnsupportedInstructionError(
                f"the emulator does not know `{opcode}`, {instruction.described()} (PTX line {instruction.line})"
            )
    return found
