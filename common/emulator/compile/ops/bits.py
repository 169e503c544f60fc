"""Logic, shifts and bit fields (PTX ISA, "Logic and Shift Instructions", "Integer Arithmetic Instructions")."""

from ...parse.ptx import Imm, Instruction
from ..emitter import BlockEmitter
from .registry import Match, alu, op

_OPERATOR = {"and": "&", "or": "|", "xor": "^"}


@alu(r"(?P<f>and|or|xor)\.(?P<t>pred|b16|b32|b64)")
def logic(m: Match, a: str, b: str) -> str:
    return f"{a} {_OPERATOR[m['f']]} {b}"


@alu(r"not\.(?P<t>pred|b16|b32|b64)")
def complement(m: Match, a: str) -> str:
    return f"~{a}"


@alu(r"cnot\.(?P<t>b16|b32|b64)")
def logical_not(m: Match, a: str) -> str:
    return f"({a} == 0).astype({a}.dtype)"


@op(r"(?P<f>shl|shr)\.(?P<t>[bus](?:16|32|64))")
def shift(e: BlockEmitter, i: Instruction, m: Match) -> None:
    value, amount = e.read(i.operands[1], m["t"]), i.operands[2]
    if isinstance(amount, Imm) and 0 <= amount.value < int(m["t"][1:]):
        count = e.read(amount, m["t"])
        e.write(i.operands[0], f"{value} {'<<' if m['f'] == 'shl' else '>>'} {count}", m["t"])
    else:
        name = "shift_left" if m["f"] == "shl" else "shift_right"
        e.write(i.operands[0], f"{name}({value}, {e.read(amount, 'u32')})", m["t"])


@alu(r"shf\.(?P<side>l|r)\.(?P<mode>clamp|wrap)\.(?P<t>b32)")
def funnel_shift(m: Match, low: str, high: str, count: str) -> str:
    return f"funnel({low}, {high}, {count}, {m['side'] == 'l'}, {m['mode'] == 'clamp'})"


@op(r"lop3\.b32")
def lop3(e: BlockEmitter, i: Instruction, m: Match) -> None:
    a, b, c = (e.read(operand, "b32") for operand in i.operands[1:4])
    table = i.operands[4]
    assert isinstance(table, Imm)
    e.write(i.operands[0], f"lop3({a}, {b}, {c}, {table.value})", "b32")


@alu(r"prmt\.(?P<t>b32)")
def permute(m: Match, a: str, b: str, selector: str) -> str:
    return f"permute_bytes({a}, {b}, {selector})"


@op(r"bfe\.(?P<t>[us](?:32|64))")
def extract(e: BlockEmitter, i: Instruction, m: Match) -> None:
    start, length = (e.read(operand, "u32") for operand in i.operands[2:4])
    e.write(i.operands[0], f"bit_extract_{m['t'][0]}({e.read(i.operands[1], m['t'])}, {start}, {length})", m["t"])


@op(r"bfi\.(?P<t>b(?:32|64))")
def insert(e: BlockEmitter, i: Instruction, m: Match) -> None:
    a, b = (e.read(operand, m["t"]) for operand in i.operands[1:3])
    start, length = (e.read(operand, "u32") for operand in i.operands[3:5])
    e.write(i.operands[0], f"bit_insert({a}, {b}, {start}, {length})", m["t"])


@alu(r"brev\.(?P<t>b32|b64)")
def reverse(m: Match, a: str) -> str:
    return f"bit_reverse({a})"


@op(r"(?P<f>popc|clz)\.(?P<t>b32|b64)")
def count_bits(e: BlockEmitter, i: Instruction, m: Match) -> None:
    value = e.read(i.operands[1], m["t"])
    e.write(
        i.operands[0], f"np.bitwise_count({value}).astype(u4)" if m["f"] == "popc" else f"leading_zeros({value})", "u32"
    )


@op(r"bfind\.(?P<t>u32|u64|b32|b64)")
def find(e: BlockEmitter, i: Instruction, m: Match) -> None:
    e.write(i.operands[0], f"bit_find({e.read(i.operands[1], m['t'])})", "u32")
