"""Proof that the emulator sees what it should: change one synchronisation of a kernel and run it again."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .compile.codegen import substitute
from .compile.program import Program
from .parse.ptx import Imm, Instruction, Operand, Reg

_GROUPS = re.compile(r"cp\.async\.(bulk\.)?(commit_group|wait_group|wait_all)|wgmma\.(fence|commit_group|wait_group)")
_OTHERS = re.compile(r"(bar|barrier|mbarrier|setmaxnreg)\.|fence\.|membar\.|griddepcontrol\.wait")
_STRONG = re.compile(r"(ld|st)\.(acquire|release|relaxed)\.(gpu|sys)\.|(atom|red)\.(?!.*(shared|\.cta))")


@dataclass(frozen=True)
class Mutation:
    """One synchronisation, what is done to it, and what stands in its place."""

    instruction: Instruction
    change: str
    substitutes: tuple[Instruction, ...]


def synchronisations(program: Program) -> Iterator[Instruction]:
    """Every barrier (also of a warp), fence, commit and wait (also for the kernel before), operation on an mbarrier and
    move of registers, in program order; and strong accesses to global memory."""
    for instruction in program.kernel.instructions:
        if any(kind.match(instruction.opcode) for kind in (_GROUPS, _OTHERS, _STRONG)):
            yield instruction


def mutations(program: Program) -> Iterator[Mutation]:
    """Every synchronisation taken out, and every count, number of bytes, parity, order and scope of one changed."""
    for instruction in synchronisations(program):
        if _STRONG.match(instruction.opcode):
            yield from _weakened(instruction)
            continue
        yield Mutation(instruction, "removed", _nothing(instruction))
        yield from _changes(instruction)


def mutated(program: Program, mutation: Mutation) -> Program:
    """The same program with one synchronisation changed."""
    return substitute(program, mutation.instruction, list(mutation.substitutes))


def _nothing(i: Instruction) -> tuple[Instruction, ...]:
    """What is left of a synchronisation that is taken out: the value that it gives to a thread that meets no other."""
    target = i.operands[0] if i.operands else None
    if not isinstance(target, Reg) or (".red." not in i.opcode and not i.opcode.startswith("mbarrier.")):
        return ()
    if i.opcode.startswith(("mbarrier.test_wait", "mbarrier.try_wait")):
        return (replace(i, opcode="mov.pred", operands=(target, Imm(1))),)
    if i.opcode.startswith("mbarrier.arrive"):
        return (replace(i, opcode="mov.b64", operands=(target, Imm(0))),)
    if ".popc" in i.opcode:
        return (replace(i, opcode="selp.u32", operands=(target, Imm(1), Imm(0), i.operands[-1])),)
    return (replace(i, opcode="mov.pred", operands=(target, i.operands[-1])),)


def _weakened(i: Instruction) -> Iterator[Mutation]:
    """A strong access without its order, and with the scope of the CTA."""
    relaxed = re.sub(r"\.(acquire|release|acq_rel)\b", ".relaxed", i.opcode)
    if relaxed != i.opcode:
        yield Mutation(i, "relaxed", (replace(i, opcode=relaxed),))
    narrow = re.sub(r"\.(gpu|sys)\b", ".cta", i.opcode)
    if narrow == i.opcode:
        narrow = i.opcode.replace(".global", ".cta.global", 1)
    yield Mutation(i, "of its CTA", (replace(i, opcode=narrow),))


def _changes(i: Instruction) -> Iterator[Mutation]:
    root = ".".join(i.opcode.split(".")[:2])
    if narrow := re.fullmatch(r"(membar\.|fence\.(?:sc\.|acq_rel\.)?)(gl|gpu|sys)", i.opcode):
        yield Mutation(i, "of its CTA", (replace(i, opcode=f"{narrow[1]}cta"),))
    if root in ("mbarrier.test_wait", "mbarrier.try_wait") and ".parity" in i.opcode:
        yield _changed(i, 2, "xor", 1, "parity flipped")
    elif root == "mbarrier.init":
        yield _changed(i, 1, "add", 1, "one arrival more")
        yield _changed(i, 1, "sub", 1, "one arrival less")
    elif root == "mbarrier.arrive" and ".expect_tx" in i.opcode:
        yield _changed(i, 2, "add", 16, "16 bytes more")
        yield _changed(i, 2, "sub", 16, "16 bytes less")
        yield Mutation(i, "no bytes", (replace(i, operands=(*i.operands[:2], Imm(0))),))
    elif root == "mbarrier.arrive":
        yield Mutation(i, "twice", (i, i))
    elif root == "mbarrier.expect_tx":
        yield _changed(i, 1, "add", 16, "16 bytes more")
        yield _changed(i, 1, "sub", 16, "16 bytes less")
    elif ".wait_group" in i.opcode:
        yield _changed(i, 0, "add", 1, "one group less")
        if i.opcode == "cp.async.bulk.wait_group":
            yield Mutation(i, "of reads alone", (replace(i, opcode=f"{i.opcode}.read"),))
    elif root in ("bar.sync", "bar.arrive", "barrier.sync", "barrier.arrive") and len(i.operands) > 1:
        yield _changed(i, 1, "add", 32, "one warp more")
        yield _changed(i, 1, "sub", 32, "one warp less")
    elif root.startswith("setmaxnreg"):
        yield _changed(i, 0, "add", 8, "8 registers more")
        yield _changed(i, 0, "sub", 8, "8 registers less")


def _changed(i: Instruction, at: int, function: str, by: int, change: str) -> Mutation:
    """An operand with another value; one in a register is computed just before."""
    value = i.operands[at]
    if isinstance(value, Imm):
        new: Operand = Imm({"add": value.value + by, "sub": value.value - by, "xor": value.value ^ by}[function])
        return Mutation(i, change, (replace(i, operands=_with(i.operands, at, new)),))
    new = Reg(f"mutated#{i.index}", "b32")
    opcode = "xor.b32" if function == "xor" else f"{function}.u32"
    computed = replace(i, opcode=opcode, operands=(new, value, Imm(by)), guard=None, guard_negated=False)
    return Mutation(i, change, (computed, replace(i, operands=_with(i.operands, at, new))))


def _with(operands: tuple[Operand, ...], at: int, new: Operand) -> tuple[Operand, ...]:
    return (*operands[:at], new, *operands[at + 1 :])
