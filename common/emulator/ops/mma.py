"""mma.sync on tensor cores (PTX ISA, "Warp Level Matrix Instructions: mma").

An mma only reads and writes registers, so it is kept pending until something else reads its result. By then its
neighbours are pending too, and all those with the same A operand become one matrix product: B is then as wide as there
are such mma. Every mma still adds its own product to its own accumulator, in program order.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import UnsupportedInstructionError
from ..ptx import Instruction, Operand, Reg, Vector
from .registry import Match, op

if TYPE_CHECKING:
    from ..codegen import BlockEmitter


@dataclass(frozen=True)
class PendingMma:
    """One mma, its operands as Python names: fragments a (4 or 2), b (2 or 1), c and d (4)."""

    index: int
    type: str
    a: tuple[str, ...]
    b: tuple[str, ...]
    c: tuple[str, ...]
    d: tuple[str, ...]


@op(r"mma\.sync\.aligned\.m16n8k(?P<k>8|16)\.row\.col\.f32\.(?P<t>f16|bf16)\.(?P=t)\.f32")
def mma(e: "BlockEmitter", i: Instruction, m: Match) -> None:
    d, a, b, c = (operand.items for operand in i.operands if isinstance(operand, Vector))
    if i.guard:
        raise UnsupportedInstructionError(f"PTX line {i.line}: an mma under a guard: `{i.text}`")
    e.line(f"if m is not None: w.converged({i.index}, m)")
    fragments_a, fragments_b = (tuple(e.read(item, "b32") for item in items) for items in (a, b))
    accumulators = tuple(_accumulator(e, item) for item in c)
    results = tuple(e.define_pending(item) for item in d if isinstance(item, Reg))
    e.pending.append(PendingMma(i.index, m["t"], fragments_a, fragments_b, accumulators, results))


def _accumulator(e: "BlockEmitter", operand: Operand) -> str:
    """The name of an accumulator, which may itself be the result of a pending mma."""
    return e.name_of(operand) if isinstance(operand, Reg) and operand.storage == "f4" else e.read(operand, "f32")


def emit_pending(e: "BlockEmitter", pending: list[PendingMma]) -> None:
    """Emits the pending mma, those with one A operand together."""
    groups: list[list[PendingMma]] = []
    producer: dict[str, int] = {}
    for item in pending:
        earliest = 1 + max((producer.get(name, -1) for name in item.c), default=-1)
        for position in range(earliest, len(groups)):
            if groups[position][0].a == item.a and groups[position][0].type == item.type:
                break
        else:
            position = len(groups)
            groups.append([])
        groups[position].append(item)
        producer.update((name, position) for name in item.d)
    stacked: dict[tuple[str, ...], str] = {}
    for group in groups:
        a = ", ".join(group[0].a)
        b = ", ".join(name for item in group for name in item.b)
        c_names = tuple(name for item in group for name in item.c)
        c = stacked.get(c_names) or f"stack_accumulators(({', '.join(c_names)},))"
        result = e.let(f"multiply({group[0].type!r}, ({a},), ({b},), {c})")
        d_names = tuple(name for item in group for name in item.d)
        e.line(f"{', '.join(d_names)} = {result}.reshape({len(d_names)}, -1, 32)")
        stacked[d_names] = result
