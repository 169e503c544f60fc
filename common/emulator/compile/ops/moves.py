"""mov, selections and comparisons (PTX ISA, "Data Movement" and "Comparison and Selection Instructions")."""

from ...parse.ptx import NUMPY_TYPES, Imm, Instruction, Operand, Pair, Reg, Sink, Vector
from ..emitter import BlockEmitter
from .halves import widen
from .registry import Match, op

_COMPARE = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}
_BOOLEAN = {"and": "&", "or": "|", "xor": "^"}


@op(r"mov\.(?P<t>pred|[bus](?:16|32|64)|f32|f64)")
def move(e: BlockEmitter, i: Instruction, m: Match) -> None:
    target, source = i.operands
    if isinstance(source, Vector):
        _pack(e, target, source)
    elif isinstance(target, Vector):
        _unpack(e, target, source, m["t"])
    elif not e.guard and isinstance(target, Reg) and isinstance(source, Reg) and target.storage == source.storage:
        e.alias(target, source)
    else:
        e.write(target, e.read(source, m["t"]), m["t"])


def _pack(e: BlockEmitter, target: Operand, source: Vector) -> None:
    assert isinstance(target, Reg)
    whole = int(target.storage[1])
    part = whole // len(source.items)
    shifted = []
    for n, item in enumerate(source.items):
        if item != Imm(0):
            count = e.namespace.constant(8 * part * n, f"u{whole}")
            value = f"{e.read(item, f'b{8 * part}')}.astype(u{whole})"
            shifted.append(f"({value} << {count})" if n else value)
    e.write(target, " | ".join(shifted) or e.namespace.constant(0, f"u{whole}"), f"b{8 * whole}")


def _unpack(e: BlockEmitter, target: Vector, source: Operand, type: str) -> None:
    whole = int(NUMPY_TYPES[type][1])
    part = whole // len(target.items)
    value = e.read(source, f"b{8 * whole}")
    for n, item in enumerate(target.items):
        if not isinstance(item, Sink):
            shifted = f"({value} >> {e.namespace.constant(8 * part * n, f'u{whole}')})" if n else value
            e.write(item, f"{shifted}.astype(u{part})", f"b{8 * part}")


@op(r"selp\.(?P<t>[bus](?:16|32|64)|f32|f64)")
def select(e: BlockEmitter, i: Instruction, m: Match) -> None:
    a, b = (e.read(operand, m["t"]) for operand in i.operands[1:3])
    e.write(i.operands[0], f"where({e.read(i.operands[3], 'pred')}, {a}, {b})", m["t"])


@op(r"slct\.(?P<t>[bus](?:16|32|64)|f32|f64)\.(?P<c>s32|f32)")
def select_by_sign(e: BlockEmitter, i: Instruction, m: Match) -> None:
    a, b = (e.read(operand, m["t"]) for operand in i.operands[1:3])
    e.write(i.operands[0], f"where({e.read(i.operands[3], m['c'])} >= 0, {a}, {b})", m["t"])


@op(
    r"setp\.(?P<c>eq|ne|lt|le|gt|ge|lo|ls|hi|hs|equ|neu|ltu|leu|gtu|geu|num|nan)(?:\.(?P<bool>and|or|xor))?"
    r"(?P<ftz>\.ftz(?=\.f32))?\.(?P<t>[bus](?:16|32|64)|f16|bf16|f32|f64)"
)
def set_predicate(e: BlockEmitter, i: Instruction, m: Match) -> None:
    if m["t"] in ("f16", "bf16"):
        a, b = (widen(m["t"], e.read(operand, "b16")) for operand in i.operands[1:3])
    else:
        a, b = _flushed(e, i, m)
    result = _comparison(m["c"], a, b, is_float="f" in m["t"])
    targets = i.operands[0]
    first, second = (targets.first, targets.second) if isinstance(targets, Pair) else (targets, Sink())
    named = e.let(result)
    combine = f" {_BOOLEAN[m['bool']]} {e.read(i.operands[3], 'pred')}" if m["bool"] else ""
    e.write(first, f"({named}){combine}", "pred")
    e.write(second, f"(~{named}){combine}", "pred")


def _flushed(e: BlockEmitter, i: Instruction, m: Match) -> list[str]:
    """The two values to compare, without subnormals if the instruction says so."""
    values = [e.read(operand, m["t"]) for operand in i.operands[1:3]]
    return [f"flush({value})" for value in values] if m["ftz"] else values


def _comparison(name: str, a: str, b: str, is_float: bool) -> str:
    """Ordered comparisons are false for NaN; the unordered ones (`u`) are true."""
    if name == "nan":
        return f"np.isnan({a}) | np.isnan({b})"
    if name == "num":
        return f"~(np.isnan({a}) | np.isnan({b}))"
    if is_float and name == "ne":
        return f"({a} < {b}) | ({a} > {b})"
    if name.endswith("u") and name != "u":
        ordered = _comparison(name[:-1], a, b, is_float)
        return f"({ordered}) | np.isnan({a}) | np.isnan({b})"
    return f"{a} {_COMPARE[name]} {b}"


@op(r"set\.(?P<c>eq|ne|lt|le|gt|ge)(?P<ftz>\.ftz(?=\.\w+\.f32))?\.(?P<d>u32|s32|f32)\.(?P<t>[us](?:16|32|64)|f32|f64)")
def set_value(e: BlockEmitter, i: Instruction, m: Match) -> None:
    a, b = _flushed(e, i, m)
    result = _comparison(m["c"], a, b, is_float=m["t"][0] == "f")
    true = e.namespace.constant(0x3F800000 if m["d"] == "f32" else 0xFFFFFFFF, NUMPY_TYPES[m["d"]])
    e.write(i.operands[0], f"where({result}, {true}, {e.namespace.constant(0, NUMPY_TYPES[m['d']])})", m["d"])
