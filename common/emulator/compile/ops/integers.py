"""Integer arithmetic (PTX ISA, "Integer Arithmetic Instructions")."""

from ...parse.ptx import NUMPY_TYPES, Instruction
from ..emitter import BlockEmitter
from .registry import Match, alu, op

_INT = r"(?P<t>[us](?:16|32|64))"
_SIGN = {"add": "+", "sub": "-", "mul": "*"}
_WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


@alu(rf"(add|sub)\.{_INT}")
def add_sub(m: Match, a: str, b: str) -> str:
    return f"{a} {_SIGN[m[1]]} {b}"


@alu(rf"mul\.(?P<part>lo|hi)\.{_INT}")
def mul(m: Match, a: str, b: str) -> str:
    return f"{a} * {b}" if m["part"] == "lo" else f"mul_hi({a}, {b})"


@alu(rf"mad\.(?P<part>lo|hi)\.{_INT}")
def mad(m: Match, a: str, b: str, c: str) -> str:
    return f"{mul(m, a, b)} + {c}"


@op(r"mul\.wide\.(?P<t>[us](?:16|32))")
def mul_wide(e: BlockEmitter, i: Instruction, m: Match) -> None:
    wide = _WIDER[m["t"]]
    a, b = (e.read(operand, m["t"]) for operand in i.operands[1:])
    e.write(i.operands[0], f"mul_wide({a}, {b}, {NUMPY_TYPES[wide]})", wide)


@op(r"mad\.wide\.(?P<t>[us](?:16|32))")
def mad_wide(e: BlockEmitter, i: Instruction, m: Match) -> None:
    wide = _WIDER[m["t"]]
    a, b = (e.read(operand, m["t"]) for operand in i.operands[1:3])
    e.write(i.operands[0], f"mul_wide({a}, {b}, {NUMPY_TYPES[wide]}) + {e.read(i.operands[3], wide)}", wide)


@alu(rf"(?P<f>div|rem)\.{_INT}")
def div_rem(m: Match, a: str, b: str) -> str:
    return f"{'divide_int' if m['f'] == 'div' else 'remainder_int'}({a}, {b})"


@alu(rf"(?P<f>min|max)\.{_INT}")
def min_max(m: Match, a: str, b: str) -> str:
    return f"np.{m['f']}imum({a}, {b})"


@alu(r"(?P<f>abs|neg)\.(?P<t>s(?:16|32|64))")
def abs_neg(m: Match, a: str) -> str:
    return f"np.abs({a})" if m["f"] == "abs" else f"-{a}"
