"""Our kernels against official ones on one problem: the same tensors, checked, then timed together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashladder.common.artifact import Artifact
from flashladder.common.baselines import Baseline
from flashladder.common.execute import on_gpu
from flashladder.common.gpu import faults_named
from flashladder.common.measure import Contender, Measurement, Settings, measure
from flashladder.common.problem import Check, Expected, Problem, Tensors, expect, make_inputs, verify


@dataclass(frozen=True)
class Contest:
    """What came of it. Ratios refer to the first baseline that takes the problem; without any, to the first kernel."""

    problem: Problem
    checks: dict[str, Check]  # of our kernels
    absent: dict[str, str]  # baselines that are missing or refuse the problem, with the reason
    measurement: Measurement | None  # of those whose output is right; None where nothing was timed

    @property
    def remarks(self) -> list[str]:
        """What a reader of the figures must know: which kernels are wrong, and what disturbed the GPU."""
        name, checks = self.problem.name, self.checks.items()
        wrong = [f"{k} is wrong, and not timed, at {name}: {fault}" for k, check in checks for fault in check.faults]
        return [*wrong, *(f"{name}: {note}" for note in (self.measurement.notes() if self.measurement else ()))]


class Arena:
    """A problem's tensors, its exact answer and its official kernels, for as many contests as are wanted.

    DeviceError without a GPU.
    """

    def __init__(self, problem: Problem, baselines: Sequence[Baseline]) -> None:
        self.problem = problem
        self.absent = {b.name: reason for b in baselines if (reason := b.missing() or b.refusal(problem))}
        self._tensors = make_inputs(problem, "cuda")
        self._expected = expect(problem, self._tensors)
        present = [baseline for baseline in baselines if baseline.name not in self.absent]
        self._theirs = [_theirs(baseline, problem, self._tensors, self._expected) for baseline in present]

    def hold(self, kernels: Mapping[str, Artifact], settings: Settings | None) -> Contest:
        """Check the kernels and, with settings, time those that are right. DeviceError at a fault."""
        ours = [
            _ours(name, artifact, self.problem, self._tensors, self._expected) for name, artifact in kernels.items()
        ]
        checks = {kernel.name: kernel.check() for kernel in ours}
        right = [kernel for kernel in ours if checks[kernel.name].passed]
        if settings is None or not right:
            return Contest(self.problem, checks, self.absent, None)
        return Contest(self.problem, checks, self.absent, measure([*self._theirs, *right], settings))


def hold(
    problem: Problem, kernels: Mapping[str, Artifact], baselines: Sequence[Baseline], settings: Settings | None
) -> Contest:
    """One contest in an arena of its own."""
    return Arena(problem, baselines).hold(kernels, settings)


def _ours(name: str, artifact: Artifact, problem: Problem, tensors: Tensors, expected: Expected) -> Contender:
    with faults_named(artifact):
        launch = on_gpu(artifact, problem, tensors)

    def check() -> Check:
        tensors.poison()
        with faults_named(artifact):
            launch()
        return verify(expected, tensors.o, tensors.lse, tensors.buffers)

    return Contender(name, launch, check)


def _theirs(baseline: Baseline, problem: Problem, tensors: Tensors, expected: Expected) -> Contender:
    run = baseline.prepare(problem, tensors)
    return Contender(baseline.name, run, lambda: verify(expected, run(), None))
