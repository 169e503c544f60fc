"""cvt between integers, floats, halves, packed halves and packed 8-bit floats (PTX ISA, "cvt"), and cvta."""

from ...parse.ptx import NUMPY_TYPES, Instruction
from ..emitter import BlockEmitter
from .halves import round_half, widen
from .registry import Match, op

_INT = r"[us](?:8|16|32|64)"


@op(rf"cvt(?P<sat>\.sat)?\.(?P<d>{_INT})\.(?P<s>{_INT})")
def integer_to_integer(e: BlockEmitter, i: Instruction, m: Match) -> None:
    source, code = e.read(i.operands[1], m["s"]), NUMPY_TYPES[m["d"]]
    if m["sat"]:
        source = f"clamp_int({source}, {code})"
    e.write(i.operands[0], f"{source}.astype({code})", m["d"])


@op(rf"cvt\.(?P<r>r[nzmp]i)(?P<ftz>\.ftz)?(?:\.sat)?\.(?P<d>{_INT})\.(?P<s>f16|f32|f64)")
def float_to_integer(e: BlockEmitter, i: Instruction, m: Match) -> None:
    source = _read_float(e, i, m)
    e.write(i.operands[0], f"float_to_int({source}, {m['r']!r}, {NUMPY_TYPES[m['d']]})", m["d"])


@op(rf"cvt\.rn\.(?P<d>f16|f32|f64)\.(?P<s>{_INT})")
def integer_to_float(e: BlockEmitter, i: Instruction, m: Match) -> None:
    _write_float(e, i, m, e.read(i.operands[1], m["s"]))


@op(r"cvt\.(?P<r>r[nzmp]i)(?P<ftz>\.ftz)?(?P<sat>\.sat)?\.(?P<d>f16|f32|f64)\.(?P<s>f16|f32|f64)")
def round_to_integral(e: BlockEmitter, i: Instruction, m: Match) -> None:
    _write_float(e, i, m, f"round_to({_read_float(e, i, m)}, {m['r']!r})")


@op(r"cvt(?:\.rn)?(?P<ftz>\.ftz)?(?P<sat>\.sat)?\.(?P<d>f16|f32|f64)\.(?P<s>f16|f32|f64)")
def float_to_float(e: BlockEmitter, i: Instruction, m: Match) -> None:
    _write_float(e, i, m, _read_float(e, i, m))


@op(r"cvt\.(?P<mode>rz|rm|rp)\.f32\.(?P<s>f64)")
def f64_to_f32_directed(e: BlockEmitter, i: Instruction, m: Match) -> None:
    e.write(i.operands[0], f"round_directed({e.read(i.operands[1], 'f64')}, {m['mode']!r})", "f32")


@op(r"cvt(?:\.ftz)?\.f32\.bf16")
def bf16_to_f32(e: BlockEmitter, i: Instruction, m: Match) -> None:
    e.write(i.operands[0], f"bf16_widen({e.read(i.operands[1], 'b16')})", "f32")


@op(r"cvt\.rn(?P<relu>\.relu)?\.(?P<d>f16|bf16)(?P<packed>x2)?\.(?P<s>f32)")
def f32_to_half(e: BlockEmitter, i: Instruction, m: Match) -> None:
    """The packed form puts its first source into the upper half."""
    sources = [e.read(operand, "f32") for operand in i.operands[1:]]
    if m["relu"]:
        zero = e.namespace.constant(0, "f4")
        sources = [f"max_nan({source}, {zero})" for source in sources]
    if m["packed"] and m["d"] == "bf16":
        e.write(i.operands[0], f"bf16_pack({sources[0]}, {sources[1]})", "b32")
        return
    halves = [round_half(m["d"], source) for source in sources]
    if m["packed"]:
        e.write(i.operands[0], f"join_halves({halves[1]}, {halves[0]})", "b32")
    else:
        e.write(i.operands[0], halves[0], "b16")


@op(r"cvt\.rn\.f16x2\.(?P<s>e4m3|e5m2)x2")
def eights_to_halves(e: BlockEmitter, i: Instruction, m: Match) -> None:
    e.write(i.operands[0], f"eights_to_halves({e.read(i.operands[1], 'b16')}, {m['s']!r})", "b32")


@op(r"cvt\.rn\.satfinite\.e4m3x2\.f32")
def floats_to_eights(e: BlockEmitter, i: Instruction, m: Match) -> None:
    """The first source goes into the upper half."""
    upper, lower = (f"to_eights({e.read(operand, 'f32')})" for operand in i.operands[1:])
    e.write(i.operands[0], f"({upper} << np.uint16(8) | {lower})", "b16")


def _read_float(e: BlockEmitter, i: Instruction, m: Match) -> str:
    if m["s"] == "f16":
        return widen("f16", e.read(i.operands[1], "b16"))
    source = e.read(i.operands[1], m["s"])
    return f"flush({source})" if m["ftz"] and m["s"] == "f32" else source


def _write_float(e: BlockEmitter, i: Instruction, m: Match, value: str) -> None:
    modifiers = m.groupdict()
    if modifiers.get("sat"):
        value = f"saturate({value})"
    if m["d"] == "f16":
        e.write(i.operands[0], round_half("f16", value), "b16")
        return
    value = f"({value}).astype({NUMPY_TYPES[m['d']]})"
    e.write(i.operands[0], f"flush({value})" if modifiers.get("ftz") and m["d"] == "f32" else value, m["d"])


@op(r"cvta(?P<to>\.to)?\.(?P<space>global|shared(?:::cta)?|const|local|param)\.u64")
def generic_address(e: BlockEmitter, i: Instruction, m: Match) -> None:
    source = e.read(i.operands[1], "u64")
    space = m["space"].removesuffix("::cta")
    if space != "global":  # where generic addresses are the same
        source = f"w.{'from' if m['to'] else 'to'}_generic({space!r}, {source})"
    e.write(i.operands[0], source, "u64")


@op(r"isspacep\.(?P<space>global|shared|const|local|param)")
def is_space(e: BlockEmitter, i: Instruction, m: Match) -> None:
    e.write(i.operands[0], f"w.is_space({m['space']!r}, {e.read(i.operands[1], 'u64')})", "pred")
