"""Arithmetic on f16, bf16 and their packed pairs (PTX ISA, "Half Precision Floating-Point Instructions").

Each is computed in f32 and rounded once: a sum or product of halves is exact there, or far enough from a tie.
"""

from collections.abc import Callable

from ...parse.ptx import Instruction
from ..emitter import BlockEmitter
from .registry import Match, op

_TYPE = r"(?P<t>bf16|f16)(?P<packed>x2)?"
_SIGN = {"add": "+", "sub": "-", "mul": "*"}


def widen(kind: str, half: str) -> str:
    """f4 of 16 bits (u2)."""
    return f"bf16_widen({half})" if kind == "bf16" else f"{half}.view(f2).astype(f4)"


def round_half(kind: str, value: str) -> str:
    """16 bits (u2) of f4."""
    return f"{kind}_round({value})"


def _per_half(e: BlockEmitter, i: Instruction, m: Match, result: Callable[..., str]) -> None:
    """Writes `result`, an expression over f4 expressions, of each half of the sources."""
    kind = m["t"]
    if not m["packed"]:
        sources = [widen(kind, e.read(operand, kind if kind == "bf16" else "b16")) for operand in i.operands[1:]]
        e.write(i.operands[0], round_half(kind, result(*sources)), "b16")
        return
    pairs = [e.let(f"halves_of({e.read(operand, 'b32')})") for operand in i.operands[1:]]
    low, high = (round_half(kind, result(*(widen(kind, f"{pair}[{side}]") for pair in pairs))) for side in (0, 1))
    e.write(i.operands[0], f"join_halves({low}, {high})", "b32")


@op(rf"(add|sub|mul)(?:\.rn)?(?P<sat>\.sat)?\.{_TYPE}")
def arithmetic(e: BlockEmitter, i: Instruction, m: Match) -> None:
    def result(a: str, b: str) -> str:
        return f"saturate({a} {_SIGN[m[1]]} {b})" if m["sat"] else f"{a} {_SIGN[m[1]]} {b}"

    _per_half(e, i, m, result)


@op(rf"fma\.rn(?P<relu>\.relu)?\.{_TYPE}")
def fma(e: BlockEmitter, i: Instruction, m: Match) -> None:
    zero = e.namespace.constant(0, "f4")

    def result(a: str, b: str, c: str) -> str:
        return f"max_nan(fma_odd({a}, {b}, {c}), {zero})" if m["relu"] else f"fma_odd({a}, {b}, {c})"

    _per_half(e, i, m, result)


@op(rf"(min|max)(?P<nan>\.NaN)?\.{_TYPE}")
def min_max(e: BlockEmitter, i: Instruction, m: Match) -> None:
    _per_half(e, i, m, lambda a, b: f"{m[1]}_{'nan' if m['nan'] else 'number'}({a}, {b})")


@op(rf"(abs|neg)\.{_TYPE}")
def abs_neg(e: BlockEmitter, i: Instruction, m: Match) -> None:
    _per_half(e, i, m, lambda a: f"np.abs({a})" if m[1] == "abs" else f"-{a}")


@op(rf"ex2\.approx(?P<ftz>\.ftz(?=\.bf16))?\.{_TYPE}")
def exponential(e: BlockEmitter, i: Instruction, m: Match) -> None:
    _per_half(e, i, m, lambda a: f"flush(np.exp2(flush({a})))" if m["ftz"] else f"np.exp2({a})")


@op(rf"tanh\.approx\.{_TYPE}")
def tanh(e: BlockEmitter, i: Instruction, m: Match) -> None:
    _per_half(e, i, m, lambda a: f"np.tanh({a})")
