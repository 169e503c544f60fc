"""What a worker does on a GPU: kernels beside an official one, or beside each other, on the same tensors, checked and
timed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from flashladder.common import catalog
from flashladder.common.catalog import Version
from flashladder.common.compiler import build_one
from flashladder.common.compiler.artifact import Artifact
from flashladder.common.errors import DeviceError, VerificationError
from flashladder.common.measure import baselines
from flashladder.common.measure.baselines import Baseline
from flashladder.common.measure.contest import Arena
from flashladder.common.measure.timing import CONTROL, Mode, TimingSettings
from flashladder.common.problem.problem import Problem
from flashladder.common.records import records
from flashladder.common.runtime import target
from flashladder.tuner.worker import Comparison, Entrants

OPPONENT = "opponent"  # what ratios refer to, under one name for all problems


def opponent(problem: Problem) -> Baseline | Version:
    """What the kernels of a problem are held against: the first official kernel that is here and takes it.

    Where there is none, it is the rung that takes it and that calls launch last. DeviceError where that is missing too.
    """
    there = torch.cuda.is_available()
    for baseline in baselines.of(problem.operation).values():
        if not there or not (baseline.missing() or baseline.refusal(problem)):
            return baseline
    for launch in reversed(catalog.ladder_of(problem.operation).launches):
        if (rung := catalog.find(launch.rung)).takes(problem):
            return rung
    raise DeviceError(
        f"there is nothing to compare with: nobody else's kernel, nor a rung that calls launch: {problem}"
    )


def opponents(problems: Iterable[Problem]) -> str:
    """Who they are, with their versions."""
    found = map(opponent, problems)
    names = (f"{each.name} {each.version}" if isinstance(each, Baseline) else each.name for each in found)
    return ", ".join(dict.fromkeys(names))


@dataclass(frozen=True)
class OnGpu:
    """Makes the bench, in the worker's process."""

    gpu: str
    mode: Mode
    alone: bool = False  # without an opponent: ratios refer to the first of ours

    def __call__(self) -> GpuBench:
        return GpuBench(self.gpu, self.mode, self.alone)


class GpuBench:
    """The first GPU that the process sees. DeviceError where that is not the one to tune for."""

    def __init__(self, gpu: str, mode: Mode, alone: bool) -> None:
        here = target.resolve("gpu", None)
        if here.gpu.name != gpu:
            raise DeviceError(
                f"the GPU here is {here.title}, not {gpu}: tune for it with --gpu here, "
                f"or rank the configurations for {gpu} without measuring: --offline"
            )
        self._mode = mode
        self._alone = alone
        self._here = here
        self._arenas: dict[Problem, Arena] = {}
        self._rungs: dict[Problem, dict[str, Artifact]] = {}  # that are opponents

    def place(self) -> records.Row:
        return records.of_place(on_gpu=True)

    def prepare(self, problem: Problem) -> None:
        if problem in self._arenas:
            return
        theirs = [] if self._alone else [opponent(problem)]
        arena = Arena(problem, [each for each in theirs if isinstance(each, Baseline)])
        _require_all(arena.absent)
        rungs = [each for each in theirs if isinstance(each, Version)]
        built = [build_one(rung, rung.config_for(problem, self._here.gpu), self._here.arch) for rung in rungs]
        self._rungs[problem] = dict(zip([OPPONENT], built, strict=False))
        self._arenas[problem] = arena

    def compare(self, problems: Sequence[Problem], entrants: Entrants, rounds: int | None) -> Comparison:
        self._arenas = {problem: self._arenas[problem] for problem in problems}  # memory for no others
        times, notes = [], []
        for number, problem in enumerate(problems):
            kernels = self._rungs[problem] | {name: artifacts[number] for name, artifacts in entrants.items()}
            contest = self._arenas[problem].hold(kernels, TimingSettings(self._mode, rounds))
            for name, check in contest.checks.items():
                check.require(name)
            _require_all(contest.absent)
            if contest.measurement is None:
                raise VerificationError("no kernel was timed")
            notes += [note for note in contest.measurement.notes() if note not in notes]
            found = {name: contest.measurement.times(name) for name in (*contest.measurement.checks, CONTROL)}
            first = contest.measurement.baseline
            times.append(found if self._alone else {OPPONENT: found.pop(first), **found})
        return Comparison(next(iter(times[0])), CONTROL, tuple(times), tuple(notes))


def _require_all(absent: Mapping[str, str]) -> None:
    for reason in absent.values():
        raise DeviceError(f"there is nothing to compare with: {reason}")
