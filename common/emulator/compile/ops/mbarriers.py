"""mbarrier (PTX ISA 9.7.13.15). The emitted code hands addresses and counts to Mbarriers; waits are gates."""

from ...errors import SynchronisationError
from ...parse.ptx import Instruction, Reg
from ..emitter import BlockEmitter
from .registry import Match, op

_CTA = r"(?:\.(?P<space>shared)(?:::cta)?)?"
_CLUSTER = r"(?:\.(?P<space>shared)(?:::cta|::cluster)?)?"
_RELEASE = r"(?:\.release\.(?P<scope>cta|cluster))?"
_ACQUIRE = r"(?:\.acquire\.(?P<scope>cta|cluster))?"
_RELAXED = r"(?:\.relaxed\.(?:cta|cluster))?"  # as without it: expect_tx and complete_tx order nothing


def _where(e: BlockEmitter, i: Instruction, m: Match, operand: int) -> str:
    return f"w, {i.index}, {m['space'] or 'generic'!r}, {e.address(i.operands[operand])}"


@op(rf"mbarrier\.init{_CTA}\.b64", outputs=0)
def initialise(e: BlockEmitter, i: Instruction, m: Match) -> None:
    e.line(f"w.mbarriers.init({_where(e, i, m, 0)}, {e.read(i.operands[1], 'u32')}, {e.mask()})")


@op(rf"mbarrier\.inval{_CTA}\.b64", outputs=0)
def invalidate(e: BlockEmitter, i: Instruction, m: Match) -> None:
    e.line(f"w.mbarriers.inval({_where(e, i, m, 0)}, {e.mask()})")


@op(rf"mbarrier\.(?P<f>expect|complete)_tx{_RELAXED}{_CLUSTER}\.b64", outputs=0)
def transactions(e: BlockEmitter, i: Instruction, m: Match) -> None:
    call = "expect_tx" if m["f"] == "expect" else "complete_tx_by"
    e.line(f"w.mbarriers.{call}({_where(e, i, m, 0)}, {e.read(i.operands[1], 'u32')}, {e.mask()})")


@op(rf"mbarrier\.arrive(?P<drop>_drop)?(?P<kind>\.expect_tx|\.noComplete)?{_RELEASE}{_CLUSTER}\.b64", tells=True)
def arrive(e: BlockEmitter, i: Instruction, m: Match) -> None:
    """state, [addr]{, count or, with .expect_tx, bytes}."""
    call = f"w.mbarriers.arrive({_where(e, i, m, 1)}, {e.mask()}"
    if len(i.operands) > 2:
        call += f", {'expect' if m['kind'] == '.expect_tx' else 'count'}={e.read(i.operands[2], 'u32')}"
    call += ", drops=True" if m["drop"] else ""
    call += ", is_narrow=True" if m["scope"] != "cluster" else ""
    call += ", may_complete=False" if m["kind"] == ".noComplete" else ""
    e.write(i.operands[0], e.let(call + ")"), "b64")


@op(rf"mbarrier\.(?:test|try)_wait(?P<parity>\.parity)?{_ACQUIRE}{_CTA}\.b64", ending="gate")
def wait(e: BlockEmitter, i: Instruction, m: Match) -> None:
    """predicate, [addr], parity or state{, time limit}. The predicate is written when the lanes go on, by the gate."""
    target, _, phase = i.operands[:3]
    if target not in e.block.live_out:
        raise SynchronisationError(f"nobody looks at whether the phase is over, and it need not be: {i.described()}")
    phases = e.read(phase, "u32" if m["parity"] else "b64")
    guard = "None" if not i.guard else f"{'~' if i.guard_negated else ''}{e.read(i.guard, 'pred')}"
    slot = e.slots[target] if isinstance(target, Reg) else None
    address = e.address(i.operands[1])
    e.result = f"MbarrierCall({address}, {phases}, {bool(m['parity'])}, {m['space'] or 'generic'!r}, {guard}, {slot})"


@op(r"mbarrier\.pending_count\.b64")
def pending_count(e: BlockEmitter, i: Instruction, m: Match) -> None:
    state = e.read(i.operands[1], "b64")
    e.write(i.operands[0], f"({state} & {e.namespace.constant(0xFFFFFFFF, 'u8')}).astype(u4)", "u32")
