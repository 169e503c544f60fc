"""What a worker does on a GPU: kernels beside official FlashAttention-2, or beside each other, on the same tensors,
checked and timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashladder.common.errors import DeviceError, VerificationError
from flashladder.common.measure import baselines
from flashladder.common.measure.baselines import Baseline
from flashladder.common.measure.contest import Arena
from flashladder.common.measure.timing import CONTROL, Mode, TimingSettings
from flashladder.common.problem.problem import Problem
from flashladder.common.records import records
from flashladder.common.runtime import target
from flashladder.tuner.worker import Comparison, Entrants


@dataclass(frozen=True)
class OnGpu:
    """Makes the bench, in the worker's process."""

    gpu: str
    mode: Mode
    operation: str | None  # whose official kernel takes part; without it ratios refer to the first of ours

    def __call__(self) -> GpuBench:
        return GpuBench(self.gpu, self.mode, [baselines.official(self.operation)] if self.operation else [])


class GpuBench:
    """The first GPU that the process sees. DeviceError where that is not the one to tune for."""

    def __init__(self, gpu: str, mode: Mode, official: Sequence[Baseline]) -> None:
        here = target.resolve("gpu", None)
        if here.gpu.name != gpu:
            raise DeviceError(
                f"the GPU here is {here.title}, not {gpu}: tune for it with --gpu here, "
                f"or rank the configurations for {gpu} without measuring: --offline"
            )
        self._mode = mode
        self._official = official
        self._arenas: dict[Problem, Arena] = {}

    def place(self) -> records.Row:
        version = self._official[0].version if self._official else ""
        return records.of_place(on_gpu=True) | {"baseline_version": version}

    def prepare(self, problem: Problem) -> None:
        if problem in self._arenas:
            return
        arena = Arena(problem, self._official)
        _require_all(arena.absent)
        self._arenas[problem] = arena

    def compare(self, problems: Sequence[Problem], entrants: Entrants, rounds: int | None) -> Comparison:
        times, notes = [], []
        for number, problem in enumerate(problems):
            kernels = {name: artifacts[number] for name, artifacts in entrants.items()}
            contest = self._arenas[problem].hold(kernels, TimingSettings(self._mode, rounds))
            for name, check in contest.checks.items():
                check.require(name)
            _require_all(contest.absent)
            if contest.measurement is None:
                raise VerificationError("no kernel was timed")
            notes += [note for note in contest.measurement.notes() if note not in notes]
            names = [*contest.measurement.checks, CONTROL]
            times.append({name: contest.measurement.times(name) for name in names})
        return Comparison(next(iter(times[0])), CONTROL, tuple(times), tuple(notes))


def _require_all(absent: Mapping[str, str]) -> None:
    for reason in absent.values():
        raise DeviceError(f"there is nothing to compare with: {reason}")
