"""A tile of rows of Q in a kernel of warpgroup products: what a warp that multiplies does, from one tile to the next.

The blocks of keys are alike, so a tile's cycles grow evenly with their number: two short tiles are simulated, and a
longer one follows from them. Whether an mbarrier stands for a tile of Q, of K or of V, the order of the waits and
releases in the machine code tells.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashladder.common.compiler.sass.code import Code
from flashladder.common.compiler.sass.opcodes import mma
from flashladder.common.compiler.sass.pipes import Rate
from flashladder.common.predict.subcore import Ring, Step, on_a_sub_core, tile_cycles

FEW, MORE = 4, 10  # blocks of keys of the tiles that are simulated
TILES = 3  # of each warp, after the first one
ELEMENT = 2  # bytes
COLD = 6  # cycles an instruction outside the loop: a warp comes by once a tile, and its code must be fetched again
Q, K, V = "Q", "K", "V"
_UNKNOWN = ""  # what an mbarrier stands for

Steps = tuple[Step, ...]


@dataclass(frozen=True)
class TileCycles:
    """How long a tile takes, by its blocks of keys."""

    fixed: float
    a_block: float

    def of(self, blocks: float) -> float:
        return self.fixed + blocks * self.a_block


@dataclass(frozen=True)
class TileWork:
    """What is done for a tile, as the cost model knows it."""

    before: Steps
    loop: Steps
    after: Steps
    is_persistent: bool
    warps: int  # of a CTA that go through it
    blocks: float  # of keys in one pass through the loop
    q_bytes: int
    kv_bytes: int  # of a tile of K or V
    places: int  # for tiles of K, and as many for V

    @classmethod
    def of(cls, code: Code) -> TileWork | None:
        """The tile of a kernel; None where its main loop has no warpgroup products."""
        tour = code.graph.tour()
        if tour is None or not any((operation := mma(i.opcode)) and operation.is_warpgroup for i in tour.loop):
            return None
        launch, config = code.artifact.launch, code.artifact.config
        before, loop, after = (tuple(map(Step.of, part)) for part in (tour.before, tour.loop, tour.after))
        before, loop, after = _with_rings(before, loop, after, tour.is_persistent)
        return cls(
            before,
            loop,
            after,
            tour.is_persistent,
            code.whole_warps,
            code.loop_blocks,
            launch.block_m * config.head_dim * ELEMENT,
            launch.block_n * config.head_dim * ELEMENT,
            int(config.num_stages) if "num_stages" in config.fields else 1,
        )

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> TileWork:
        """The tile that dataclasses.asdict made into plain values."""
        steps = {name: tuple(Step(**step) for step in values[name]) for name in ("before", "loop", "after")}
        return cls(**{**values, **steps})

    def cycles(self, ctas: int, rates: Mapping[str, Rate]) -> TileCycles:
        """From one tile to the next, where so many CTAs share an SM."""
        few, more = (self._simulated(number, ctas, rates) for number in (FEW, MORE))
        a_block = (more - few) / (MORE - FEW)
        return TileCycles(few - FEW * a_block, a_block)

    def _simulated(self, blocks: int, ctas: int, rates: Mapping[str, Rate]) -> float:
        passes = round((blocks - _is_peeled(self.before)) / self.blocks)
        steps = (*map(_cold, self.before), *self.loop * passes, *map(_cold, self.after))
        used = {step.ring for step in steps}
        rings = {Q: Ring(1, self.q_bytes), K: Ring(self.places, self.kv_bytes), V: Ring(self.places, self.kv_bytes)}
        return tile_cycles(
            steps,
            ctas,
            on_a_sub_core(self.warps),
            rates,
            {name: ring for name, ring in rings.items() if name in used},
            is_persistent=self.is_persistent,
            tiles=TILES,
        )


def _cold(step: Step) -> Step:
    return dataclasses.replace(step, stall=max(step.stall, COLD))


def _is_peeled(before: Sequence[Step]) -> bool:
    """Whether the first Q K^T stands before the loop, and the last P V behind it."""
    return any(mma(step.opcode) for step in before)


def _with_rings(before: Steps, loop: Steps, after: Steps, is_persistent: bool) -> tuple[Steps, Steps, Steps]:
    """The steps with the rings that they wait for and release; without, where that is not as it is known here.

    The loop waits for K and then for V, and releases them in this order. Q comes first of all. A persistent CTA has
    asked for it long before, unless its place is released behind a barrier at the end: that means O was there.
    """
    releases = _releases(loop)
    if len(releases) != 2 or sum(step.is_arrival for step in loop) != 2:
        return before, loop, after
    is_peeled = _is_peeled(before)
    barriers = [number for number, step in enumerate(after) if step.base == "BAR"]
    of_q = [number for number in _releases(after) if is_persistent and barriers and number > barriers[0]][:1]
    arrivals = [number for number, step in enumerate(after) if step.is_arrival]
    of_v = [number for number in _releases(after) if is_peeled and number > min(arrivals, default=0)][:1]
    of_k = _releases(before)[-1:] if is_peeled else []
    if is_persistent and is_peeled and not (of_k and of_v and arrivals):
        return before, loop, after  # a place that nobody releases would be waited for forever
    first = Q if of_q or not is_persistent else _UNKNOWN
    return (
        _named(before, [first, K] if is_peeled else [first], dict.fromkeys(of_k, K)),
        _named(loop, [K, V], dict(zip(releases, (K, V), strict=True))),
        _named(after, [V] if is_peeled else [], dict.fromkeys(of_q, Q) | dict.fromkeys(of_v, V)),
    )


def _releases(steps: Sequence[Step]) -> list[int]:
    """Where places are released; of copies one after the other, which bring parts of one tile, the first."""
    found: list[int] = []
    previous = ""
    for number, step in enumerate(steps):
        if step.is_release and not (step.base == previous == "UTMALDG"):
            found.append(number)
        if step.is_release or step.is_arrival or mma(step.opcode):
            previous = step.base
    return found


def _named(steps: Sequence[Step], arrivals: Sequence[str], releases: Mapping[int, str]) -> Steps:
    """The steps with these rings: of waits in their order, of releases by their place."""
    rest = iter(arrivals)
    return tuple(
        dataclasses.replace(step, ring=next(rest, _UNKNOWN) if step.is_arrival else releases.get(number, _UNKNOWN))
        for number, step in enumerate(steps)
    )
