"""wgmma (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"), which execute/warpgroup.py performs."""

from ...errors import UnsupportedInstructionError
from ...parse.ptx import Imm, Instruction, Operand, Reg, Vector
from ..emitter import BlockEmitter
from ..forms import Form
from .registry import Match, op

_SIXTEEN = r"k16\.(?:(?P<d16>f32)\.(?P<bf>bf16)\.bf16|(?P<d>f16|f32)\.(?P<f>f16)\.f16)"
_EIGHT = r"k32\.(?P<d8>f16|f32)\.(?P<a>e4m3|e5m2)\.(?P<b>e4m3|e5m2)"


_ALONGSIDE = {"add", "and", "cvt", "mad", "mov", "mul", "or", "selp", "setp", "shl", "shr", "sub", "xor"}


@op(rf"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)(?:{_SIXTEEN}|{_EIGHT})", updates=True)
def multiply(e: BlockEmitter, i: Instruction, m: Match) -> None:
    """d, a (a descriptor, or four registers), b-desc, scale-d, scale-a, scale-b{, trans-a}{, trans-b}."""
    _no_guard(i)
    d, a, b, adds, *constants = i.operands
    columns, types = int(m["n"]), (m["a"], m["b"]) if m["a"] else (m["bf"] or m["f"],) * 2
    result = m["d16"] or m["d"] or m["d8"]
    in_registers = isinstance(a, Vector)
    scales = [_constant(i, each, (-1, 1)) for each in constants[:2]]
    transposes = [_constant(i, each, (0, 1)) for each in constants[2:]]
    expected = 0 if m["a"] else 1 if in_registers else 2
    assert isinstance(d, Vector)
    registers = [item for item in d.items if isinstance(item, Reg)]
    wanted = columns // (4 if result == "f16" else 2)
    if columns % 8 or not 8 <= columns <= 256 or len(registers) != wanted or len(transposes) != expected:
        raise UnsupportedInstructionError(
            f"operands that do not fit m64n{columns}, {i.described()} (PTX line {i.line})"
        )
    form = Form(
        index=i.index,
        columns=columns,
        types=types,
        result=result,
        slots=tuple(e.slots[reg] for reg in registers),
        storage=tuple(reg.storage for reg in registers),
        a_in_registers=in_registers,
        transposed=(bool(transposes[0]) if expected == 2 else False, bool(transposes[-1]) if expected else False),
        negative=scales[0] != scales[1],
    )
    name = e.namespace.named(f"form{i.index}", form)
    operands = [e.read(item, "b32") for item in a.items] if isinstance(a, Vector) else [e.read(a, "b64")]
    values = f"({', '.join(operands)},), {e.read(b, 'b64')}, {e.read(adds, 'pred')}"
    e.line(f"warpgroup_of(w).start(w, {name}, {values}, {_is_followed(e, i)}, m)")


def _is_followed(e: BlockEmitter, i: Instruction) -> bool:
    """Whether another product comes before anything that orders or accesses memory, or the end of the block."""
    for following in e.block.instructions[e.block.instructions.index(i) + 1 :]:
        if following.opcode.startswith("wgmma.mma_async"):
            return True
        if following.opcode.split(".")[0] not in _ALONGSIDE:
            break
    return False


@op(r"wgmma\.fence\.sync\.aligned", outputs=0)
def fence(e: BlockEmitter, i: Instruction, m: Match) -> None:
    """It orders registers; inflight.py sees to that before a kernel runs."""
    _no_guard(i)
    e.line(f"w.converged({i.index}, m)")


@op(r"wgmma\.commit_group\.sync\.aligned", outputs=0)
def commit(e: BlockEmitter, i: Instruction, m: Match) -> None:
    _no_guard(i)
    e.line(f"warpgroup_of(w).commit(w, {i.index}, m)")


@op(r"wgmma\.wait_group\.sync\.aligned", outputs=0, ending="gate")
def wait(e: BlockEmitter, i: Instruction, m: Match) -> None:
    _no_guard(i)
    e.result = f"WaitCall({i.index}, {_constant(i, i.operands[0], range(8))})"


def _no_guard(i: Instruction) -> None:
    if i.guard:
        raise UnsupportedInstructionError(f"a wgmma under a guard, {i.described()} (PTX line {i.line})")


def _constant(i: Instruction, operand: Operand, allowed: "tuple[int, ...] | range") -> int:
    if not isinstance(operand, Imm) or operand.value not in allowed:
        raise UnsupportedInstructionError(
            f"an operand that is none of {list(allowed)}, {i.described()} (PTX line {i.line})"
        )
    return operand.value
