"""Each basic block becomes one Python function on numpy arrays.

A block function takes (w, R, m): the RunningWarp, its registers (a list of arrays) and the mask (None: all lanes of all
CTAs). It returns what its last instruction needs: a predicate for a branch, operand values for a gate, otherwise None.
Arithmetic runs on all lanes; the mask of the lanes that are really here applies to side effects and to the write-back
of the registers that live on.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..parse.ptx import Instruction, PtxKernel, Reg
from .blocks import build_blocks, perhaps_unwritten, reads, sources, writes
from .emitter import BlockEmitter
from .inflight import check_products, concern_products
from .ops import lookup
from .program import BlockFunction, Namespace, Program, PtxBlock


def compile_kernel(kernel: PtxKernel, vocabulary: Mapping[str, Any]) -> Program:
    """Generates and compiles the code of all blocks, which speaks in a vocabulary of helpers (execute/vocabulary.py).

    Raises:
        EmulatorError: an unknown instruction, or a register that may be touched while a product in flight uses it.
    """
    blocks = build_blocks(kernel)
    check_products(blocks)
    slots: dict[Reg, int] = {}
    for instruction in kernel.instructions:
        for reg in (*writes(instruction), *reads(instruction)):
            slots.setdefault(reg, len(slots))
    program = Program(kernel, blocks, slots, Namespace(vocabulary), perhaps_unwritten(blocks))
    program.functions.extend(_compile_blocks(program, blocks))
    return program


def substitute(program: Program, instruction: Instruction, substitutes: list[Instruction]) -> Program:
    """The same program with others in place of one instruction; they write what it writes, or registers of their own,
    and only the last of them may end a block, if it did."""
    old = next(block for block in program.blocks if instruction in block.instructions)
    at = old.instructions.index(instruction)
    kept = [*old.instructions[:at], *substitutes, *old.instructions[at + 1 :]]
    new = replace(old, instructions=kept, ending=lookup(kept[-1])[0].ending if kept else "")
    slots = dict(program.slots)
    for reg in (reg for each in substitutes for reg in writes(each)):
        slots.setdefault(reg, len(slots))
    program = replace(program, slots=slots)
    blocks, functions = list(program.blocks), list(program.functions)
    blocks[old.index] = new
    if concern_products([instruction, *substitutes], blocks):
        check_products(blocks)
    (functions[old.index],) = _compile_blocks(program, [new])
    return replace(program, blocks=blocks, functions=functions)


def _compile_blocks(program: Program, blocks: list[PtxBlock]) -> list[BlockFunction]:
    source = "\n".join(_source(block, program) for block in blocks)
    functions = dict(program.namespace.values)
    exec(compile(source, f"<{program.kernel.name}>", "exec"), functions)
    return [functions[f"block_{block.index}"] for block in blocks]


def _source(block: PtxBlock, program: Program) -> str:
    """The function of a block."""
    e = BlockEmitter(block, program, {reg: i.index for i in block.instructions for reg in reads(i)})
    for i in block.instructions:
        operation, match = lookup(i)
        e.begin(i, is_guarded=not operation.ending)
        for reg in program.doubtful.intersection(sources(i)):
            e.line(f"w.require_written({i.index}, {reg.name!r}, {e.slots[reg]}, {e.mask()})")
        operation.emit(e, i, match)
        for reg in program.doubtful.intersection(writes(i)):
            e.line(f"w.note_written({e.slots[reg]}, {e.mask()})")
    return e.function()
