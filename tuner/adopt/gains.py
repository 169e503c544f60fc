"""What a program gains: its problems timed as torch computes them, with the rung's default, and with the winner."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashladder.common.catalog import Version, winners
from flashladder.common.measure import baselines
from flashladder.common.measure.baselines import Baseline
from flashladder.common.measure.baselines.forward import AS_TORCH_CHOOSES
from flashladder.common.measure.contest import Arena
from flashladder.common.measure.entrants import Entrant, assemble
from flashladder.common.measure.statistics import Estimate, paired_ratio
from flashladder.common.measure.timing import Measurement, TimingSettings
from flashladder.common.problem.config import KernelConfig
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.target import Target
from flashladder.tuner.adopt.demand import Alike, fields_of

TIMED = 12  # problems of a program that are timed, the heaviest
DEFAULT, WINNER = "default", "winner"
Choose = Callable[[Problem], Version]  # which rung computes a problem
ESTIMATES = ("ratio", "to_default")


@dataclass(frozen=True)
class Gain:
    """Times in microseconds, of one call. For windows, softcaps, ALiBi the baseline is the default."""

    problem: Problem
    calls: int
    weight: float  # calls of this problem that stand for all calls of those alike
    rung: str
    config: str  # the winner's, or the default's where there is none
    baseline: str  # "sdpa": what torch chose; "fa2"; "default"
    baseline_us: float
    default_us: float
    ours_us: float
    ratio: Estimate  # the baseline's time / ours
    to_default: Estimate  # the default's time / ours
    notes: tuple[str, ...] = ()

    @property
    def has_official(self) -> bool:
        """Whether torch has a kernel for it."""
        return self.baseline not in (DEFAULT, WINNER)

    @property
    def before_us(self) -> float:
        """What the program takes for all calls of those alike with the baseline."""
        return self.weight * self.baseline_us

    @property
    def after_us(self) -> float:
        """The same with ours, where ours is the faster: a program leaves the others as they are."""
        return self.weight * min(self.ours_us, self.baseline_us)

    def as_json(self) -> dict[str, Any]:
        """Plain values, which `of_json` reads."""
        return {**vars(self), "problem": fields_of(self.problem), **{n: vars(getattr(self, n)) for n in ESTIMATES}}

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Gain:
        """Raises KeyError, TypeError or ValueError for what is none."""
        estimates = {name: Estimate(**values[name]) for name in ESTIMATES}
        made = cls(**{**values, **estimates, "problem": Problem(**values["problem"]), "notes": tuple(values["notes"])})
        figures = (made.baseline_us, made.default_us, made.ours_us, *(e.value for e in estimates.values()))
        if not all(0 < figure < math.inf for figure in figures):
            raise ValueError(f"{made.problem.name} has a time or a ratio that was never measured")
        return made


def measure(
    alike: Sequence[Alike], choose: Choose, place: Target, folder: Path, settings: TimingSettings
) -> tuple[list[Gain], list[str]]:
    """The gain of each problem, by its rung and the winners in a folder; and in sentences what was not timed, and why.

    DeviceError without a GPU or where a kernel faults.
    """
    gains, left_out = [], []
    for each in alike:
        rung = choose(each.problem)
        config = winners.config(rung, place.gpu.name, each.problem, folder)
        entrants = [Entrant(DEFAULT, rung, {})]
        if config is not None:
            entrants.append(Entrant(WINNER, rung, config.as_dict()))
        lineup, refusals = assemble(entrants, [each.problem], place)
        left_out += refusals
        if kernels := lineup.get(each.problem):
            try:
                contest = Arena(each.problem, official(each.problem)).hold(kernels, settings)
            except torch.OutOfMemoryError:
                left_out.append(f"not timed, since the GPU's memory is full: {each.problem.name}")
                continue
            left_out += [
                f"{name} is wrong at {each.problem.name}" for name, c in contest.checks.items() if not c.passed
            ]
            if contest.measurement and contest.measurement.checks.keys() & kernels.keys():
                used = config or rung.config_for(each.problem, place.gpu)
                gains.append(_gain(each, rung, used, contest.measurement))
    return gains, list(dict.fromkeys(left_out))


def official(problem: Problem) -> list[Baseline]:
    """What a program ran before, as torch has it; the first that takes the problem is what gains are over."""
    first = baselines.official(problem.operation)
    return [first] if problem.packed else [AS_TORCH_CHOOSES, first]


def _gain(each: Alike, rung: Version, config: KernelConfig, measured: Measurement) -> Gain:
    ours = WINNER if WINNER in measured.checks else DEFAULT
    default = DEFAULT if DEFAULT in measured.checks else ours
    times = measured.times(ours)
    return Gain(
        problem=each.problem,
        calls=each.calls,
        weight=each.weight,
        rung=rung.name,
        config=config.name,
        baseline=measured.baseline,
        baseline_us=measured.time_us(measured.baseline),
        default_us=measured.time_us(default),
        ours_us=measured.time_us(ours),
        ratio=paired_ratio(measured.times(measured.baseline), times),
        to_default=paired_ratio(measured.times(default), times),
        notes=tuple(measured.notes()),
    )
