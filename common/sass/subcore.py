"""One sub-core of an SM, simulated: how long its warps take for a pass through a kernel's main loop.

Warps issue in order, one instruction a cycle, the one that has been ready for longest first. An instruction waits for
what the compiler's control bits say (stall cycles, scoreboards), for its pipe, and at barriers and for asynchronous
copies. The other three sub-cores do the same at the same time, so what an SM shares is divided by four. Latencies are
rounded figures of microbenchmarks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from flashladder.common.sass.instruction import NO_BARRIER, SassInstruction
from flashladder.common.sass.occupancy import SUB_CORES
from flashladder.common.sass.pipes import Rate, work

PASSES = 4  # of every warp through the loop, on average; the first fills pipes and copies, and is not counted
GLOBAL_LATENCY = 600  # cycles until an asynchronous copy from L2 is there while all SMs copy
BARRIER_LATENCY = 20
# Cycles until the result of an instruction of variable latency is there, with no other in its way, by opcode.
LATENCY = {"LDSM": 30, "LDS": 25, "SHFL": 24, "MUFU": 20, "LDL": 40, "LDG": GLOBAL_LATENCY, "S2R": 20}
OTHER_LATENCY = 10
# Cycles of its sub-core's tensor core that another instruction takes, whichever warp it belongs to, by opcode: measured
# on an H100 for this project on 2026-11-21 (versions/20_woven_copies/README.md).
BESIDE_MMA = {"FFMA": 1.3, "FADD": 1.0, "FMUL": 1.0, "IMAD": 1.4, "F2FP": 0.7, "IADD3": 0.4, "MUFU": 0.7}


@dataclass(frozen=True)
class Step:
    """What an instruction of the loop asks of a sub-core; a list of these, as JSON, is all the simulation needs."""

    opcode: str
    is_filler: bool
    stall: int
    waits: int  # scoreboards, a bit each
    sets: int  # scoreboard, or NO_BARRIER
    pending: int  # of DEPBAR: copies that may still be under way

    @classmethod
    def of(cls, instruction: SassInstruction) -> Step:
        """The step of an instruction."""
        control = instruction.control
        last = instruction.operands[-1] if instruction.base == "DEPBAR" else ""
        pending = int(last, 16) if last.startswith("0x") else 0
        return cls(
            instruction.opcode,
            instruction.is_filler,
            control.stall,
            control.wait_mask,
            control.write_barrier,
            pending,
        )

    @property
    def base(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]


@dataclass
class _Warp:
    """Where a warp is, and what it waits for; times are cycles."""

    at: int = 0  # step
    ready: float = 0.0
    scoreboards: list[float] = field(default_factory=lambda: [0.0] * 8)
    copies: list[float] = field(default_factory=list)  # when each committed group of copies will be there
    latest_copy: float = 0.0
    at_barrier: bool = False


@dataclass(frozen=True)
class _Cost:
    """A step with what it costs on this GPU."""

    kind: str  # plain, copy, commit, wait or barrier
    stall: int
    waits: tuple[int, ...]
    sets: int
    latency: float
    pipes: tuple[tuple[str, float], ...]  # cycles of each pipe of the sub-core
    pending: int


# Conflicts repeat their passes of the load/store path, and no access to the banks: results/profile.csv, rung 01. Copies
# are written past that path, and shuffles have no banks.
_CONFLICTING = {"LDS", "STS", "LDSM", "STSM"}
_KINDS = {"LDGSTS": "copy", "LDGDEPBAR": "commit", "DEPBAR": "wait", "BAR": "barrier"}


def cycles(
    steps: Sequence[Step],
    ctas: int,
    warps_a_cta: int,
    rates: Mapping[str, Rate],
    conflict_factor: float = 1.0,
    *,
    beside_mma: Mapping[str, float] = MappingProxyType({}),
    passes: int = PASSES,
) -> float:
    """Cycles that one pass takes when `ctas` CTAs, with so many warps each on this sub-core, run side by side.

    Args:
        steps: the loop.
        ctas: side by side on the SM.
        warps_a_cta: of each on this sub-core.
        rates: of the pipes (sass.throughput).
        conflict_factor: by how much bank conflicts lengthen the way of loads and stores of shared memory.
        beside_mma: cycles of the tensor core that other instructions take, by opcode (BESIDE_MMA).
        passes: of every warp; the more, the less the start matters.
    """
    costs = [_cost(step, rates, conflict_factor, beside_mma) for step in steps]
    groups = [[_Warp() for _ in range(warps_a_cta)] for _ in range(ctas)]
    warps = [warp for group in groups for warp in group]
    group_of = {id(warp): group for group in groups for warp in group}
    free: dict[str, float] = {}
    now = start_of_count = 0.0
    done = 0  # passes of all warps together
    while done < passes * len(warps):
        start, warp = min(
            ((_start(warp, costs[warp.at], free), warp) for warp in warps if not warp.at_barrier),
            key=lambda pair: pair[0],
        )
        now = max(now + 1, start)
        _issue(warp, costs[warp.at], now, free)
        if all(other.at_barrier for other in group_of[id(warp)]):
            for other in group_of[id(warp)]:
                other.at_barrier, other.ready = False, max(other.ready, now + BARRIER_LATENCY)
        warp.at = (warp.at + 1) % len(costs)
        if warp.at == 0:
            done += 1
            if done == len(warps):
                start_of_count = now
    return (now - start_of_count) / (passes - 1)


def _start(warp: _Warp, cost: _Cost, free: Mapping[str, float]) -> float:
    """When the warp could issue its next instruction."""
    start = max(warp.ready, *(free.get(pipe, 0.0) for pipe, _ in cost.pipes), 0.0)
    for scoreboard in cost.waits:
        start = max(start, warp.scoreboards[scoreboard])
    if cost.kind == "wait" and len(warp.copies) > cost.pending:
        start = max(start, warp.copies[-cost.pending - 1])
    return start


def _issue(warp: _Warp, cost: _Cost, now: float, free: dict[str, float]) -> None:
    warp.ready = now + max(1, cost.stall)
    for pipe, busy in cost.pipes:
        free[pipe] = now + busy
    if cost.sets != NO_BARRIER:
        warp.scoreboards[cost.sets] = max(warp.scoreboards[cost.sets], now + cost.latency)
    if cost.kind == "copy":
        warp.latest_copy = now + GLOBAL_LATENCY
    elif cost.kind == "commit":
        warp.copies = [*warp.copies[-7:], warp.latest_copy]
    elif cost.kind == "barrier":
        warp.at_barrier = True


def _cost(step: Step, rates: Mapping[str, Rate], conflict_factor: float, beside_mma: Mapping[str, float]) -> _Cost:
    pipes: dict[str, Any] = {
        pipe: amount / rates[pipe].per_clock * SUB_CORES
        for pipe, amount in work(step.opcode, step.is_filler).items()
        if pipe in rates and pipe != "issue" and amount
    }
    if step.base in beside_mma and not step.is_filler:
        pipes["tensor"] = beside_mma[step.base]
    repeated = 0.0
    if step.base in _CONFLICTING:
        repeated = pipes["lsu"] * (conflict_factor - 1)
        pipes["lsu"] += repeated
    return _Cost(
        kind=_KINDS.get(step.base, "plain"),
        stall=step.stall,
        waits=tuple(bit for bit in range(6) if step.waits >> bit & 1),
        sets=step.sets if step.base != "LDGDEPBAR" else NO_BARRIER,
        latency=LATENCY.get(step.base, OTHER_LATENCY) + repeated,
        pipes=tuple(pipes.items()),
        pending=step.pending,
    )
