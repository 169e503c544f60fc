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


def hold(
    problem: Problem, kernels: Mapping[str, Artifact], baselines: Sequence[Baseline], settings: Settings | None
) -> Contest:
    """Check the kernels and, with settings, time those that are right. DeviceError without a GPU, or at a fault."""
    tensors = make_inputs(problem, "cuda")
    expected = expect(problem, tensors)
    absent = {b.name: reason for b in baselines if (reason := b.missing() or b.refusal(problem))}
    ours = [_ours(name, artifact, problem, tensors, expected) for name, artifact in kernels.items()]
    checks = {kernel.name: kernel.check() for kernel in ours}
    right = [kernel for kernel in ours if checks[kernel.name].passed]
    if settings is None or not right:
        return Contest(problem, checks, absent, None)
    theirs = [_theirs(b, problem, tensors, expected) for b in baselines if b.name not in absent]
    measurement = measure([*theirs, *right], settings)
    return Contest(problem, checks, absent, measurement)


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
