"""Paired timing on the GPU: every contender in every round, in shuffled ABBA order, with the baseline against itself.

Five modes, never mixed. Hot: launches back to back for about 2 ms, the inputs in L2 as far as they fit, at the clocks
of a short burst that all contenders share. Graph: the same launches in a CUDA graph, which is replayed once before.
Cold_graph: they go from one copy of the tensors to the next, which together are larger than L2. Cold: single launches,
before each of which L2 is filled with other memory; the figure includes about 2 us that two events cost. Sustained:
launches for half a second, of which the second half counts, so that each contender runs at the clock that its own power
allows.

The host is never timed: a sample's work waits in the GPU's queue behind a kernel that holds it back until enough is
there. All hold it for as long, so that no kernel comes upon a cooler card. Samples carry the GPU's clock, power,
temperature and what slowed it. Between samples, single calls are checked unannounced (spot.py).
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Protocol, get_args

import numpy as np
import torch

from flashladder.common.catalog.schema import Mode
from flashladder.common.errors import CheatError, DeviceError
from flashladder.common.measure import clocks, graphs
from flashladder.common.measure.l2 import Flush, SetAside
from flashladder.common.measure.nvml import GpuState, Monitor
from flashladder.common.measure.spot import Queue, SpotChecks, Stage
from flashladder.common.measure.statistics import Estimate, Times, Verdict, noise_floor, paired_ratio, verdict
from flashladder.common.problem.check import Check
from flashladder.common.runtime.gpu import CYCLES_PER_US

MODES: tuple[Mode, ...] = get_args(Mode)
CONTROL = "control"  # the baseline once more

SAMPLE_US = {"hot": 2e3, "graph": 2e3, "cold_graph": 2e3, "cold": 1e3, "sustained": 250e3}
BUDGET_S = {"hot": 2.5, "graph": 2.5, "cold_graph": 2.5, "cold": 2.5, "sustained": 15.0}  # of one shape
MIN_ROUNDS = {"hot": 16, "graph": 16, "cold_graph": 16, "cold": 16, "sustained": 4}
MAX_LAUNCHES = {"hot": 200, "graph": 200, "cold_graph": 200, "cold": 10, "sustained": 20_000}
WANTED_HALF_WIDTH = 0.002  # rounds go on until every ratio's interval is this narrow, or the budget is spent
LONGER_HOLDS = (1, 8, 64)  # where the host did not get there in time
SPOT_HOLD_US = 500  # for what is queued around a call that is spot-checked
CLOCK_BAND = 0.02  # of a clock beside the baseline's
LOUD = 0.05  # noise that a reader must know of


# The launch on copies of the tensors, as many as an L2 of so many bytes does not hold.
Elsewhere = Callable[[int], Sequence[Callable[[], object]]]


def _nowhere(_: int) -> Sequence[Callable[[], object]]:
    return ()


@dataclass(frozen=True)
class Contender:
    """An entrant or a baseline on a problem's tensors: a launch, and what calls one and tells whether it is right."""

    name: str
    launch: Callable[[], object]
    verify: Callable[[Callable[[], object]], Check]
    stage: Stage | None = None  # its tensors, where it is spot-checked
    is_official: bool = False  # left out, not an error, where no CUDA graph holds it
    elsewhere: Elsewhere = _nowhere

    def check(self, replay: Callable[[], object] | None = None) -> Check:
        """Of the launch, or of a replay."""
        return self.verify(replay or self.launch)


@dataclass(frozen=True)
class TimingSettings:
    """How to time. With `rounds`, exactly so many; otherwise as many as the intervals need and the budget allows."""

    mode: Mode = "hot"
    rounds: int | None = None
    seed: int = 0
    budget_s: float | None = None  # of one shape (default: the mode's)


@dataclass(frozen=True)
class Sample:
    """The time of one launch, in microseconds: the mean of `launches` (cold: their median; CPU: the least)."""

    round: int
    contender: str
    launches: int
    time_us: float
    state: GpuState


@dataclass(frozen=True)
class Measurement:
    """The samples of one problem; the first contender is the baseline of every ratio."""

    mode: Mode
    baseline: str
    samples: tuple[Sample, ...]
    checks: dict[str, Check]
    warnings: tuple[str, ...] = ()
    absent: dict[str, str] = field(default_factory=dict)  # official contenders that were left out, with the reason

    @cached_property
    def rounds(self) -> int:
        """How many rounds were timed."""
        return self.samples[-1].round + 1

    @cached_property
    def names(self) -> list[str]:
        """The contenders and the control, without the baseline."""
        return [name for name in dict.fromkeys(s.contender for s in self.samples) if name != self.baseline]

    def times(self, name: str) -> Times:
        """The time of each round: the mean of its samples, in microseconds."""
        sums = np.zeros(self.rounds)
        counts = np.zeros(self.rounds)
        for sample in self.samples:
            if sample.contender == name:
                sums[sample.round] += sample.time_us
                counts[sample.round] += 1
        return sums / counts

    def time_us(self, name: str) -> float:
        """The median over rounds."""
        return float(np.median(self.times(name)))

    def ratio(self, name: str) -> Estimate:
        """The baseline's time / this contender's."""
        return paired_ratio(self.times(self.baseline), self.times(name))

    @cached_property
    def control(self) -> Estimate:
        """The baseline against itself: what noise alone does."""
        return self.ratio(CONTROL)

    def verdict(self, name: str) -> Verdict:
        """Whether the contender is faster or slower than the baseline."""
        return verdict(self.ratio(name), self.control)

    def slowed_by(self, words: Collection[str]) -> float | None:
        """The share of the samples in which any of these slowed the GPU; None where that was not recorded."""
        if not any(sample.state.is_known for sample in self.samples):
            return None
        return sum(any(word in words for word in sample.state.slowdowns) for sample in self.samples) / len(self.samples)

    def notes(self) -> list[str]:
        """What a reader of the figures must know of the GPU: slowdowns, other users, what was not recorded."""
        words = dict.fromkeys(word for sample in self.samples for word in sample.state.slowdowns)
        slowed = [f"{word} in {self.slowed_by({word}) or 0:.0%} of samples" for word in words]
        return [*slowed, *self._other_clocks(), *self.disturbances()]

    def disturbances(self) -> list[str]:
        """What of it is in no figure of its own."""
        noise = noise_floor(self.control) if CONTROL in self.names else 0
        noisy = [f"the same kernel differs from itself by {noise:.0%} here"] if noise > LOUD else []
        return [*noisy, *self.warnings]

    def _other_clocks(self) -> Iterator[str]:
        """Whose times compare clocks too. Sustained, each has the clock that its power allows."""
        if self.mode == "sustained" or not (base := self.clock_mhz(self.baseline)):
            return
        for name in self.names:
            if (clock := self.clock_mhz(name)) and abs(clock / base - 1) > CLOCK_BAND:
                yield f"{name} ran at {clock:.0f} MHz, {self.baseline} at {base:.0f}"

    def clock_mhz(self, name: str) -> float | None:
        """The median SM clock while the contender ran."""
        clocks = [s.state.sm_mhz for s in self.samples if s.contender == name and s.state.sm_mhz is not None]
        return median(clocks) if clocks else None


@dataclass(frozen=True)
class SamplePlan:
    """One sample of a contender."""

    launch: Callable[[], object]
    launches: int  # timed
    lead: int  # calls before, that are not timed
    hold_us: float  # until the queue has enough
    launches_a_call: int = 1  # those of a graph


class Foul(Exception):
    """What a launch did to look faster, to be read after the contender's name."""


class Timer(Protocol):
    """Times launches on one device."""

    def plan(self, launch: Callable[[], object], elsewhere: Elsewhere = _nowhere) -> SamplePlan:
        """How a sample of this launch is to be taken."""

    def sample(self, plan: SamplePlan) -> tuple[float, GpuState]:
        """Microseconds a launch, and the GPU's state while it ran. Foul where the launch did what none may."""

    def once(self, launch: Callable[[], object], before: Queue, after: Queue) -> float:
        """Microseconds of a single launch; what is queued right before and right behind it is outside the time."""

    def warnings(self) -> tuple[str, ...]:
        """What is wrong with the device as a thing to measure on."""


def measure(
    contenders: Sequence[Contender], settings: TimingSettings = TimingSettings(), timer: Timer | None = None
) -> Measurement:
    """Time the contenders against the first of them, by a timer: without one, on the current GPU and stream.

    Outputs are checked before, amid and after; VerificationError names a contender that is wrong,
    CheatError one that looks faster than it is, DeviceError one of ours that no graph holds, and there are no figures.
    """
    for contender in contenders:
        contender.check().require(f"{contender.name}, before it was timed,")
    timer = timer or _GpuTimer(settings.mode)
    with _no_garbage_collection():
        plans, absent = _plans(timer, contenders)
        timed = [contender for contender in contenders if contender.name in plans]
        baseline = timed[0].name
        spots = [SpotChecks(c.name, c.launch, c.stage, settings.seed) for c in timed if c.stage]
        samples = _rounds(timer, plans | {CONTROL: plans[baseline]}, baseline, settings, spots)
    checks = {contender.name: contender.check(plans[contender.name].launch) for contender in timed}
    for name, check in checks.items():
        check.require(f"{name}, after it was timed,")
    return Measurement(settings.mode, baseline, tuple(samples), checks, timer.warnings(), absent)


def _plans(timer: Timer, contenders: Sequence[Contender]) -> tuple[dict[str, SamplePlan], dict[str, str]]:
    """A plan for each, which all hold the queue for as long as the slowest host needs; and why others have none."""
    plans, absent = {}, {}
    for contender in contenders:
        try:
            with _named(contender.name):
                plans[contender.name] = timer.plan(contender.launch, contender.elsewhere)
        except graphs.CaptureError as error:
            absent[contender.name] = f"{contender.name} {error}"
            if not contender.is_official:
                raise DeviceError(absent[contender.name]) from None
    hold_us = max(plan.hold_us for plan in plans.values())
    return {name: replace(plan, hold_us=hold_us) for name, plan in plans.items()}, absent


def _rounds(
    timer: Timer, plans: dict[str, SamplePlan], baseline: str, settings: TimingSettings, spots: Sequence[SpotChecks]
) -> list[Sample]:
    """Rounds until there are enough; in each, every contender twice: in shuffled order, then in the reverse."""
    rng = random.Random(settings.seed)
    begin = time.perf_counter()
    samples: list[Sample] = []
    while True:
        number = len(samples) // (2 * len(plans))
        order = rng.sample(list(plans), len(plans))
        for name in order + order[::-1]:
            with _named(name):
                samples.append(Sample(number, name, plans[name].launches, *timer.sample(plans[name])))
        for spot in spots:
            spot.now_and_then(timer)
        so_far = Measurement(settings.mode, baseline, tuple(samples), {})
        if _enough(so_far, settings, time.perf_counter() - begin):
            break
    for spot in spots:
        spot.finish(timer)
    return samples


@contextmanager
def _named(name: str) -> Iterator[None]:
    """A foul is this contender's, and so is a clock that was replaced."""
    try:
        with clocks.kept(name):
            yield
    except Foul as foul:
        raise CheatError(f"{name} {foul}") from None


def _enough(so_far: Measurement, settings: TimingSettings, seconds: float) -> bool:
    if settings.rounds:
        return so_far.rounds >= settings.rounds
    budget = settings.budget_s or BUDGET_S[settings.mode]
    if so_far.rounds < MIN_ROUNDS[settings.mode]:
        return so_far.rounds > 1 and seconds > 3 * budget  # a very slow kernel
    return seconds > budget or (so_far.rounds % 4 == 0 and _is_sharp(so_far))


def _is_sharp(so_far: Measurement) -> bool:
    ratios = [so_far.ratio(name) for name in so_far.names]
    return all(ratio.high - ratio.low <= 2 * WANTED_HALF_WIDTH * ratio.value for ratio in ratios)


class _GpuTimer:
    """Times launches on the current device, in one mode."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self._warnings: list[str] = []
        self._monitor = Monitor(torch.cuda.current_device())
        count = MAX_LAUNCHES["cold"] if mode == "cold" else 1
        self._events = [(_event(), _event()) for _ in range(count)]
        self._held = torch.cuda.Event()
        self._set_aside = SetAside()
        self._l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._flush = Flush(self._l2_bytes if mode == "cold" else 0)

    def plan(self, launch: Callable[[], object], elsewhere: Elsewhere = _nowhere) -> SamplePlan:
        """How many launches make a sample, and how long the queue must be held for them."""
        # Of a graph of one launch: a launch that waits for the GPU could not be estimated, nor is it captured.
        in_graph = self.mode in ("graph", "cold_graph")
        gpu_us, host_us = self._estimate(graphs.Captured([launch]) if in_graph else launch)
        wanted = round(SAMPLE_US[self.mode] / gpu_us)
        launches = min(max(1, wanted), MAX_LAUNCHES[self.mode])
        if in_graph:
            turn = [*(elsewhere(self._l2_bytes) if self.mode == "cold_graph" else ()), launch]
            turns = -(-launches // len(turn))
            launches = turns * len(turn)
            replay = graphs.Captured(turns * turn)
            all_us, host_us = self._estimate(replay)
            graphs.require_all(launches, all_us / launches, gpu_us)
            return SamplePlan(replay, launches, 1, 100 + 2 * host_us, launches_a_call=launches)
        lead = {"hot": 1 if launches > 1 else 0, "cold": 0, "sustained": launches}[self.mode]
        dry = max(0.0, 1.3 * host_us - gpu_us) * (lead + launches)
        if dry and self.mode == "sustained":
            self._warnings.append(f"a launch of {gpu_us:.0f} us takes the host {host_us:.0f} us: the GPU waits for it")
        return SamplePlan(launch, launches, lead, 100 + 2 * host_us + dry)

    def sample(self, plan: SamplePlan) -> tuple[float, GpuState]:
        """Microseconds a launch, and the GPU's state while it ran."""
        self._set_aside.clear()
        torch.cuda.synchronize()  # nobody's leftovers, on whatever stream, run beside it
        result = self._cold(plan) if self.mode == "cold" else self._back_to_back(plan)
        if kept := self._set_aside.bytes():
            self._set_aside.clear()
            raise Foul(f"sets {kept / 2**20:.1f} MiB of L2 aside, where its inputs would outlive a flush")
        return result

    def once(self, launch: Callable[[], object], before: Queue, after: Queue) -> float:
        """Microseconds of a single launch; what is queued right before and right behind it is outside the time."""
        (start, end) = self._events[0]
        self._hold(SPOT_HOLD_US)
        before()
        start.record()
        launch()
        end.record()
        after()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3

    def warnings(self) -> tuple[str, ...]:
        """What is wrong with this GPU, or this problem, as a thing to measure."""
        others = self._monitor.other_processes()
        shared = [f"the GPU is shared with {others} other processes"] if others else []
        return (*shared, *self._warnings, *filter(None, [self._monitor.missing]))

    def _back_to_back(self, plan: SamplePlan) -> tuple[float, GpuState]:
        (start, end) = self._events[0]
        for longer in LONGER_HOLDS:
            self._hold(longer * plan.hold_us)
            for _ in range(plan.lead):
                plan.launch()
            start.record()
            plan.launch()
            in_time = plan.lead > 1 or not self._held.query()  # a long lead keeps the GPU busy itself
            for _ in range(plan.launches // plan.launches_a_call - 1):
                plan.launch()
            end.record()
            state = self._monitor.read()
            end.synchronize()
            if in_time:
                return start.elapsed_time(end) * 1e3 / plan.launches, state
        raise Foul(f"lets the GPU idle before it is timed: the host came later than {longer * plan.hold_us:.0f} us")

    def _cold(self, plan: SamplePlan) -> tuple[float, GpuState]:
        events = self._events[: plan.launches]
        self._hold(plan.hold_us)
        for start, end in events:
            self._flush()
            start.record()
            plan.launch()
            end.record()
        state = self._monitor.read()
        events[-1][1].synchronize()
        return median(start.elapsed_time(end) for start, end in events) * 1e3, state

    def _hold(self, microseconds: float) -> None:
        torch.cuda._sleep(int(microseconds * CYCLES_PER_US))
        self._held.record()

    def _estimate(self, launch: Callable[[], object]) -> tuple[float, float]:
        """Microseconds that a launch takes on the GPU and on the host, after a warm-up."""
        launch()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(3):
            launch()
        host_us = (time.perf_counter() - begin) / 3 * 1e6
        torch.cuda.synchronize()
        gpu_us, _ = self._back_to_back(SamplePlan(launch, launches=3, lead=1, hold_us=100 + 8 * host_us))
        return gpu_us, host_us


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
