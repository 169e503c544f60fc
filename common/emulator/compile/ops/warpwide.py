"""Exchanges within a warp: shfl, vote, redux, activemask, bar.warp.sync (PTX ISA, "Parallel Synchronization")."""

from ...parse.ptx import Instruction, Pair, Sink
from ..emitter import BlockEmitter
from .registry import Match, op


@op(r"shfl\.sync\.(?P<mode>up|down|bfly|idx)\.b32")
def shuffle(e: BlockEmitter, i: Instruction, m: Match) -> None:
    target = i.operands[0]
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
    value, lane, clamp, members = (e.read(operand, "b32") for operand in i.operands[1:])
    result = e.let(f"w.shuffle({i.index}, {m['mode']!r}, {value}, {lane}, {clamp}, {members}, {e.mask()})")
    e.write(first, f"{result}[0]", "b32")
    e.write(second, f"{result}[1]", "pred")


@op(r"vote\.sync\.(?P<mode>all|any|uni|ballot)\.(?:pred|b32)")
def vote(e: BlockEmitter, i: Instruction, m: Match) -> None:
    predicate, members = e.read(i.operands[1], "pred"), e.read(i.operands[2], "b32")
    result = f"w.vote({i.index}, {m['mode']!r}, {predicate}, {members}, {e.mask()})"
    e.write(i.operands[0], result, "b32" if m["mode"] == "ballot" else "pred")


@op(r"redux\.sync\.(?P<f>add|min|max|and|or|xor)\.(?P<t>u32|s32|b32)")
def reduce(e: BlockEmitter, i: Instruction, m: Match) -> None:
    value, members = e.read(i.operands[1], m["t"]), e.read(i.operands[2], "b32")
    e.write(i.operands[0], f"w.reduce({i.index}, {m['f']!r}, {value}, {members}, {e.mask()})", m["t"])


@op(r"activemask\.b32")
def active_mask(e: BlockEmitter, i: Instruction, m: Match) -> None:
    e.write(i.operands[0], f"w.active_mask({e.mask()})", "b32")


@op(r"bar\.warp\.sync", outputs=0)
def sync_warp(e: BlockEmitter, i: Instruction, m: Match) -> None:
    e.line(f"w.sync_warp({i.index}, {e.read(i.operands[0], 'b32')}, {e.mask()})")


@op(r"nanosleep\.u32", outputs=0)
def sleep(e: BlockEmitter, i: Instruction, m: Match) -> None:
    """Time does not pass here."""
