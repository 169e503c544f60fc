"""Clusters of CTAs: mapa, getctarank, barrier.cluster (PTX ISA 9.7.9.23, .24 and 9.7.13.3)."""

from ...parse.ptx import Address, Instruction, Reg
from ..emitter import BlockEmitter
from .registry import Match, op


@op(r"mapa(?P<space>\.shared::cluster)?\.(?P<t>u32|u64)")
def map_address(e: BlockEmitter, i: Instruction, m: Match) -> None:
    """d, a, rank: where the shared memory at `a` lies in the CTA of a rank."""
    source = i.operands[1]
    place = e.address(source) if isinstance(source, Address) else e.read(source, m["t"])
    if isinstance(source, Address) and isinstance(source.base, Reg):
        place = f"({place}).astype({m['t'][0]}{int(m['t'][1:]) // 8})"
    e.write(i.operands[0], f"w.map_address({place}, {e.read(i.operands[2], 'u32')}, {not m['space']})", m["t"])


@op(r"getctarank(?P<space>\.shared::cluster)?\.(?P<t>u32|u64)")
def rank_of_address(e: BlockEmitter, i: Instruction, m: Match) -> None:
    e.write(i.operands[0], f"w.rank_of({e.read(i.operands[1], m['t'])}, {not m['space']})", "u32")


@op(r"barrier\.cluster\.(?:(?P<arrive>arrive)(?:\.(?P<sem>release|relaxed))?|wait(?:\.acquire)?)(?P<aligned>\.aligned)?",
    outputs=0, ending="gate")  # fmt: skip
def barrier(e: BlockEmitter, i: Instruction, m: Match) -> None:
    guard = f"{'~' if i.guard_negated else ''}{e.read(i.guard, 'pred')}" if i.guard else "None"
    waits, releases = not m["arrive"], m["sem"] != "relaxed"
    e.result = f"ClusterCall({i.index}, {waits}, {releases}, {bool(m['aligned'])}, {guard})"
