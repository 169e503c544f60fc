"""mma.sync on tensor cores (PTX ISA, "Warp Level Matrix Instructions: mma"), which pending.py joins."""

from ...errors import UnsupportedInstructionError
from ...parse.ptx import Instruction, Reg, Vector
from ..emitter import BlockEmitter
from ..pending import PendingMma
from .registry import Match, op


@op(r"mma\.sync\.aligned\.m16n8k(?P<k>8|16)\.row\.col\.f32\.(?P<t>f16|bf16)\.(?P=t)\.f32")
def mma(e: BlockEmitter, i: Instruction, m: Match) -> None:
    d, a, b, c = (operand.items for operand in i.operands if isinstance(operand, Vector))
    if i.guard:
        raise UnsupportedInstructionError(f"PTX line {i.line}: an mma under a guard: `{i.text}`")
    e.line(f"if m is not None: w.converged({i.index}, m)")
    fragments_a, fragments_b = (tuple(e.read(item, "b32") for item in items) for items in (a, b))
    accumulators = tuple(e.accumulator(item) for item in c)
    results = tuple(e.define_pending(item) for item in d if isinstance(item, Reg))
    e.pending.append(PendingMma(i.index, m["t"], fragments_a, fragments_b, accumulators, results))
