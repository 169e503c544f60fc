"""Fences, elect.sync, setmaxnreg, griddepcontrol (PTX ISA 9.7.13.4, .13, .14 and 9.7.19.5)."""

from ...errors import SynchronisationError
from ...parse.ptx import Imm, Instruction, Pair
from ..emitter import BlockEmitter
from .registry import Match, op


@op(r"(membar|fence)(?:\.(?:sc|acq_rel|acquire|release))?\.(?P<scope>cta|cluster|gpu|gl|sys)", outputs=0)
def fence(e: BlockEmitter, i: Instruction, m: Match) -> None:
    """Memory is sequentially consistent here; what a fence orders, the race detector knows."""
    if m["scope"] != "cta":
        scope = "cluster" if m["scope"] == "cluster" else "gpu"
        e.line(f"w.fence({scope!r}, {e.mask()})")


@op(r"fence\.mbarrier_init\.release\.cluster", outputs=0)
def fence_of_mbarriers(e: BlockEmitter, i: Instruction, m: Match) -> None:
    e.line(f"w.fence('mbarrier_init', {e.mask()})")


@op(r"fence\.proxy\.async(?:\.shared::(?:cta|cluster))?", outputs=0)
def fence_of_proxies(e: BlockEmitter, i: Instruction, m: Match) -> None:
    e.line(f"w.fence('proxy', {e.mask()})")


@op(
    r"fence\.proxy\.(?:async\.global|alias|tensormap::generic\.(?:acquire|release)\.(?:cta|cluster|gpu|sys))", outputs=0
)
def fence_elsewhere(e: BlockEmitter, i: Instruction, m: Match) -> None:
    """Orders accesses to global memory, between which no races are looked for."""


@op(r"elect\.sync")
def elect(e: BlockEmitter, i: Instruction, m: Match) -> None:
    """leader|predicate, members."""
    target = i.operands[0]
    assert isinstance(target, Pair)
    leader = e.let(f"w.elect({i.index}, {e.read(i.operands[1], 'b32')}, {e.mask()})")
    e.write(target.first, leader, "u32")
    e.write(target.second, f"{leader} == all_lanes", "pred")


@op(r"setmaxnreg\.(?P<f>inc|dec)\.sync\.aligned\.u32", outputs=0, ending="gate")
def set_registers(e: BlockEmitter, i: Instruction, m: Match) -> None:
    count = i.operands[0]
    if not isinstance(count, Imm) or count.value % 8 or not 24 <= count.value <= 256:
        raise SynchronisationError(f"setmaxnreg takes a multiple of 8 from 24 to 256, {i.described()}")
    if i.guard:
        raise SynchronisationError(f"a setmaxnreg under a guard, {i.described()}")
    e.result = f"RegisterCall({count.value}, {m['f'] == 'inc'})"


@op(r"griddepcontrol\.(?P<f>wait|launch_dependents)", outputs=0)
def grid_dependency(e: BlockEmitter, i: Instruction, m: Match) -> None:
    """Grids run one after the other here: whatever a grid depends on is complete. The race detector knows better."""
    if m["f"] == "wait":
        e.line(f"w.wait_for_grids({e.mask()})")
