"""One sub-core of an SM, simulated: how long its warps take for a pass through a kernel's main loop.

Warps issue in order, one instruction a cycle, the one that has been ready for longest first. An instruction waits for
what the compiler's control bits say (stall cycles, scoreboards), for its pipe, and at barriers and for asynchronous
copies. The other three sub-cores do the same at the same time, so what an SM shares is divided by four. Latencies are
rounded figures of microbenchmarks.

A warpgroup product (wgmma) is queued, and its warp goes on: it waits for the product where WARPGROUP.DEPBAR says so.
A tile that TMA brings is waited for at its mbarrier, and asked for when all warps of the CTA have released its place
(`Ring`; tile.py says which wait and which release belong together).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from flashladder.common.compiler.sass.instruction import NO_BARRIER, SassInstruction
from flashladder.common.compiler.sass.occupancy import SUB_CORES
from flashladder.common.compiler.sass.opcodes import access_width, mma, operand_bytes, reads_a
from flashladder.common.compiler.sass.pipes import WARP, Rate, work

PASSES = 4  # of every warp through the loop, on average; the first fills pipes and copies, and is not counted
GLOBAL_LATENCY = 600  # cycles until an asynchronous copy from L2 is there while all SMs copy
BARRIER_LATENCY = 20
# Cycles until the result of an instruction of variable latency is there, with no other in its way, by opcode.
LATENCY = {"LDSM": 30, "LDS": 25, "SHFL": 24, "MUFU": 20, "LDL": 40, "LDG": GLOBAL_LATENCY, "S2R": 20}
OTHER_LATENCY = 10
# Cycles of its sub-core's tensor core that another instruction takes, whichever warp it belongs to, by opcode: measured
# on an H100 for this project on 2026-11-21 (versions/forward/20_woven_copies/README.md).
BESIDE_MMA = {"FFMA": 1.3, "FADD": 1.0, "FMUL": 1.0, "IMAD": 1.4, "F2FP": 0.7, "IADD3": 0.4, "MUFU": 0.7}

# Of kernels with warpgroup products alone, which were held against an H200 (docs/cost-model.md):
PRODUCT_LATENCY = 40  # cycles from the end of a product until a warp that waits for it goes on
COPY_RATE = 48  # bytes a clock that L2 gives an SM; its port is 64 wide
SHARED_RATE = 128  # bytes a clock of shared memory, for the operands of products and for what copies bring
MOST_WRITTEN = 0.5  # of that, by copies
TMA_LATENCY = 500  # cycles from the end of a copy by TMA until a warp that waits for it goes on
LAUNCH = 700  # cycles from the end of a CTA until the next one in its place issues


@dataclass(frozen=True)
class Step:
    """What an instruction of the loop asks of a sub-core; a list of these, as JSON, is all the simulation needs."""

    opcode: str
    is_filler: bool
    stall: int
    waits: int  # scoreboards, a bit each
    sets: int  # scoreboard, or NO_BARRIER
    pending: int  # of a wait for copies or for warpgroup products: groups that may still be under way
    commits: bool = False  # a warpgroup product, the last one of a group
    from_shared: bool = False  # a warpgroup product that reads A, too, from shared memory
    ring: str = ""  # of a wait for a tile, and of its release: which tiles; of others nothing is known

    @classmethod
    def of(cls, instruction: SassInstruction) -> Step:
        """The step of an instruction."""
        control, operands = instruction.control, instruction.operands
        last = operands[-1] if "DEPBAR" in (instruction.base, *instruction.modifiers) else ""
        pending = int(last, 16) if last.startswith("0x") else 0
        is_product = _is_warpgroup(instruction.opcode)
        return cls(
            instruction.opcode,
            instruction.is_filler,
            control.stall,
            control.wait_mask,
            control.write_barrier,
            pending,
            is_product and any(operand.startswith("gsb") for operand in operands),
            reads_a(instruction.text),
        )

    @property
    def base(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def is_arrival(self) -> bool:
        """Whether it asks an mbarrier if its phase is over."""
        return self.opcode.startswith("SYNCS.PHASECHK")

    @property
    def is_release(self) -> bool:
        """Whether it tells an mbarrier that a tile was read, or copies the next one to its place."""
        return self.base == "UTMALDG" or self.opcode.startswith("SYNCS.ARRIVE.TRANS64.A1T0")


@dataclass(frozen=True)
class Ring:
    """Places of shared memory for tiles of one kind, which copies fill one after the other."""

    places: int
    tile_bytes: int


@dataclass
class _WarpState:
    """Where a warp is, and what it waits for; times are cycles."""

    at: int = 0  # step
    ready: float = 0.0
    scoreboards: list[float] = field(default_factory=lambda: [0.0] * 8)
    copies: list[float] = field(default_factory=list)  # when each committed group of copies will be there
    latest_copy: float = 0.0
    products: list[float] = field(default_factory=list)  # when each committed group of products will be done
    taken: Counter[str] = field(default_factory=Counter)  # tiles of each ring that it waited for
    released: Counter[str] = field(default_factory=Counter)
    at_barrier: bool = False


@dataclass
class _Cta:
    """Its warps on this sub-core, and when the tiles that it asked for are there, by ring."""

    warps: list[_WarpState]
    arrivals: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


@dataclass(frozen=True)
class _Cost:
    """A step with what it costs on this GPU."""

    kind: str  # plain, copy, commit, wait, barrier, product, products, arrival or release
    stall: int
    waits: tuple[int, ...]
    sets: int
    latency: float
    pipes: tuple[tuple[str, float], ...]  # cycles of each pipe of the sub-core
    pending: int
    copied: int  # bytes that it and its likes of the other sub-cores copy
    product: float  # cycles of the tensor core, which it queues for
    operands: float  # cycles of shared memory for them
    beside: float  # cycles by which it makes the products under way longer
    commits: bool
    ring: str


# Conflicts repeat their passes of the load/store path, and no access to the banks: results/profile.csv.gz, rung 01.
# Copies are written past that path, and shuffles have no banks.
_CONFLICTING = {"LDS", "STS", "LDSM", "STSM"}
_KINDS = {"LDGSTS": "copy", "LDGDEPBAR": "commit", "DEPBAR": "wait", "BAR": "barrier"}


def on_a_sub_core(warps: int) -> int:
    """How many of a CTA's warps are on one sub-core."""
    return max(1, warps // SUB_CORES)


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
    core = _SubCore([_cost(step, rates, conflict_factor, beside_mma) for step in steps], ctas, warps_a_cta)
    number = ctas * warps_a_cta
    ends = core.run(passes * number)
    return (ends[-1] - ends[number - 1]) / (passes - 1)


def tile_cycles(
    steps: Sequence[Step],
    ctas: int,
    warps_a_cta: int,
    rates: Mapping[str, Rate],
    rings: Mapping[str, Ring],
    *,
    is_persistent: bool,
    tiles: int,
) -> float:
    """Cycles from one tile of rows to the next, where the steps are a warp's way through one, as cycles() has them.

    Rings: the tiles of Q, K and V. A persistent CTA asks for them as their places are released; another one begins with
    empty places, LAUNCH cycles after the one before it.
    """
    costs = [_cost(step, rates, 1.0, BESIDE_MMA) for step in steps]
    core = _SubCore(costs, ctas, warps_a_cta, rings, copy_rate=COPY_RATE, renews=not is_persistent)
    number = ctas * warps_a_cta
    ends = core.run((tiles + 1) * number)
    firsts, lasts = ends[:number], ends[-number:]
    return (sum(lasts) - sum(firsts)) / number / tiles


class _SubCore:
    """What runs, and when each pipe is free."""

    def __init__(
        self,
        costs: Sequence[_Cost],
        ctas: int,
        warps_a_cta: int,
        rings: Mapping[str, Ring] = MappingProxyType({}),
        *,
        copy_rate: float = math.inf,
        renews: bool = False,
    ) -> None:
        """Copy_rate: bytes a clock. Renews: whether a CTA that has made its pass is followed by another one."""
        self._costs = costs
        self._rings = rings
        self._copy_rate = copy_rate
        self._renews = renews
        self._ctas = [_Cta([_WarpState() for _ in range(warps_a_cta)]) for _ in range(ctas)]
        self._warps = [warp for cta in self._ctas for warp in cta.warps]
        self._cta_of = {id(warp): cta for cta in self._ctas for warp in cta.warps}
        self._free: dict[str, float] = defaultdict(float)
        self._tensor_free = 0.0  # when the queue of warpgroup products is empty
        self._copied = 0.0  # when all that was asked for is on its way
        self._written = 0  # bytes of shared memory
        for cta in self._ctas:
            self._fill(cta, 0.0)

    def run(self, passes: int) -> list[float]:
        """When each pass of a warp ended, for so many of all warps together."""
        ends: list[float] = []
        now = 0.0
        while len(ends) < passes:
            start, warp = min(
                ((self._start(warp), warp) for warp in self._warps if not warp.at_barrier), key=lambda pair: pair[0]
            )
            now = max(now + 1, start)
            cta = self._cta_of[id(warp)]
            self._issue(warp, cta, self._costs[warp.at], now)
            warp.at = (warp.at + 1) % len(self._costs)
            if warp.at == 0:
                ends.append(now)
                warp.at_barrier |= self._renews
            if all(other.at_barrier for other in cta.warps):
                self._meet(cta, now)
        return ends

    def _meet(self, cta: _Cta, now: float) -> None:
        """All warps of a CTA are at a barrier, or at its end."""
        is_end = self._renews and all(warp.at == 0 for warp in cta.warps)
        if is_end:
            self._fill(cta, now + LAUNCH)
        for warp in cta.warps:
            warp.at_barrier, warp.ready = False, max(warp.ready, now + (LAUNCH if is_end else BARRIER_LATENCY))

    def _fill(self, cta: _Cta, now: float) -> None:
        """A CTA begins: the first tiles of each ring are asked for."""
        cta.arrivals.clear()
        for warp in cta.warps:
            warp.taken.clear()
            warp.released.clear()
        for place in range(max((ring.places for ring in self._rings.values()), default=0)):
            for name, ring in self._rings.items():
                if place < ring.places:
                    self._ask(cta, name, now)

    def _ask(self, cta: _Cta, ring: str, now: float) -> None:
        """A copy of a tile begins."""
        cta.arrivals[ring].append(self._copy(self._rings[ring].tile_bytes, now) + TMA_LATENCY)

    def _copy(self, size: int, now: float) -> float:
        """When the last of so many bytes, all sub-cores' share, leaves L2."""
        self._copied = max(now, self._copied) + size / self._copy_rate
        self._written += size
        return self._copied

    def _start(self, warp: _WarpState) -> float:
        """When the warp could issue its next instruction."""
        cost = self._costs[warp.at]
        start = max(warp.ready, *(self._free[pipe] for pipe, _ in cost.pipes), 0.0)
        for scoreboard in cost.waits:
            start = max(start, warp.scoreboards[scoreboard])
        if cost.kind == "wait" and len(warp.copies) > cost.pending:
            start = max(start, warp.copies[-cost.pending - 1])
        elif cost.kind == "products" and len(warp.products) > cost.pending:
            start = max(start, warp.products[-cost.pending - 1])
        elif cost.kind == "arrival":
            arrivals, number = self._cta_of[id(warp)].arrivals[cost.ring], warp.taken[cost.ring]
            start = max(start, arrivals[number]) if number < len(arrivals) else math.inf
        return start

    def _issue(self, warp: _WarpState, cta: _Cta, cost: _Cost, now: float) -> None:
        warp.ready = now + max(1, cost.stall)
        for pipe, busy in cost.pipes:
            self._free[pipe] = now + busy
        if cost.sets != NO_BARRIER:
            warp.scoreboards[cost.sets] = max(warp.scoreboards[cost.sets], now + cost.latency)
        if cost.beside and self._tensor_free > now:
            self._delay(cost.beside, now)
        if cost.kind == "copy":
            warp.latest_copy = self._copy(cost.copied, now) + GLOBAL_LATENCY
        elif cost.kind == "commit":
            warp.copies = [*warp.copies[-7:], warp.latest_copy]
        elif cost.kind == "barrier":
            warp.at_barrier = True
        elif cost.kind == "product":
            self._queue(warp, cost, now)
        elif cost.kind == "arrival":
            warp.taken[cost.ring] += 1
        elif cost.kind == "release":
            warp.released[cost.ring] += 1
            if warp.released[cost.ring] == min(other.released[cost.ring] for other in cta.warps):
                self._ask(cta, cost.ring, now)

    def _queue(self, warp: _WarpState, cost: _Cost, now: float) -> None:
        """A product queues for the tensor core. Its operands have what copies leave of shared memory's time."""
        begin = max(now, self._tensor_free)
        left = 1 - min(MOST_WRITTEN, self._written / SHARED_RATE / begin) if begin else 1.0
        self._tensor_free = begin + max(cost.product, cost.operands / left)
        if cost.commits:
            warp.products = [*warp.products[-7:], self._tensor_free + PRODUCT_LATENCY]

    def _delay(self, by: float, now: float) -> None:
        """The products under way end later."""
        self._tensor_free += by
        for warp in self._warps:
            warp.products = [end + by if end > now else end for end in warp.products]


def _cost(step: Step, rates: Mapping[str, Rate], conflict_factor: float, beside_mma: Mapping[str, float]) -> _Cost:
    pipes: dict[str, Any] = {
        pipe: amount / rates[pipe].per_clock * SUB_CORES
        for pipe, amount in work(step.opcode, step.is_filler).items()
        if pipe in rates and pipe != "issue" and amount
    }
    beside = 0.0 if step.is_filler else beside_mma.get(step.base, 0.0)
    if beside:
        pipes["tensor"] = beside
    repeated = 0.0
    if step.base in _CONFLICTING:
        repeated = pipes["lsu"] * (conflict_factor - 1)
        pipes["lsu"] += repeated
    product = pipes.pop("wgmma", 0.0)
    if product:
        pipes.clear()  # its way to shared memory is `operands`
    return _Cost(
        kind="product" if product else _kind(step),
        stall=step.stall,
        waits=tuple(bit for bit in range(6) if step.waits >> bit & 1),
        sets=step.sets if step.base != "LDGDEPBAR" else NO_BARRIER,
        latency=LATENCY.get(step.base, OTHER_LATENCY) + repeated,
        pipes=tuple(pipes.items()),
        pending=step.pending,
        copied=access_width(step.opcode) * WARP * 4 * SUB_CORES if step.base == "LDGSTS" else 0,
        product=product,
        operands=operand_bytes(step.opcode, step.from_shared) / SHARED_RATE,
        beside=beside,
        commits=step.commits,
        ring=step.ring,
    )


def _kind(step: Step) -> str:
    if step.ring:
        return "arrival" if step.is_arrival else "release"
    if step.opcode.startswith("WARPGROUP.DEPBAR"):
        return "products"
    return _KINDS.get(step.base, "plain")


def _is_warpgroup(opcode: str) -> bool:
    operation = mma(opcode)
    return bool(operation and operation.is_warpgroup)
