"""Our kernels against official ones on one problem: the same tensors, checked, then timed together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

from flashladder.common.build.artifact import Artifact
from flashladder.common.measure.baselines import Baseline
from flashladder.common.measure.cpu_timer import CpuTimer
from flashladder.common.measure.timing import Contender, Measurement, TimingSettings, measure
from flashladder.common.problem import Check, Expected, Problem, Tensors, expect, make_inputs, verify
from flashladder.common.references import Configured, Prepared
from flashladder.common.run.execute import on_gpu
from flashladder.common.run.gpu import faults_named


@dataclass(frozen=True)
class Contest:
    """What came of it. Ratios refer to the first baseline that takes the problem; without any, to the first kernel."""

    problem: Problem
    checks: dict[str, Check]  # of our kernels
    absent: dict[str, str]  # baselines that are missing or refuse the problem, with the reason
    measurement: Measurement | None  # of those whose output is right; None where nothing was timed
    facts: dict[str, Mapping[str, str]] = field(default_factory=dict)  # what references tell of their run

    @property
    def remarks(self) -> list[str]:
        """What a reader of the figures must know: which kernels are wrong, and what disturbed the GPU."""
        name, checks = self.problem.name, self.checks.items()
        wrong = [f"{k} is wrong, and not timed, at {name}: {fault}" for k, check in checks for fault in check.faults]
        return [*wrong, *(f"{name}: {note}" for note in (self.measurement.notes() if self.measurement else ()))]


class Arena:
    """A problem's tensors, its exact answer and its official kernels, for as many contests as are wanted.

    DeviceError without a GPU; on the device cpu, references alone can hold contests with CPU_BASELINES.
    """

    def __init__(self, problem: Problem, baselines: Sequence[Baseline], device: str = "cuda") -> None:
        self.problem = problem
        self._device = device
        self.absent = {b.name: reason for b in baselines if (reason := b.missing() or b.refusal(problem))}
        self._tensors = make_inputs(problem, device)
        self._expected = expect(problem, self._tensors)
        present = [baseline for baseline in baselines if baseline.name not in self.absent]
        self._theirs = [_theirs(baseline, problem, self._tensors, self._expected) for baseline in present]

    def hold(self, kernels: Mapping[str, Artifact | Configured], settings: TimingSettings | None) -> Contest:
        """Check the kernels and, with settings, time those that are right. DeviceError at a fault."""
        ours = [_ours(name, kernel, self.problem, self._tensors, self._expected) for name, kernel in kernels.items()]
        checks = {kernel.name: kernel.check() for kernel in ours}
        facts = {kernel.name: kernel.launch.facts() for kernel in ours if isinstance(kernel.launch, Prepared)}
        right = [kernel for kernel in ours if checks[kernel.name].passed]
        if settings is None or not right:
            return Contest(self.problem, checks, self.absent, None, facts)
        timer = CpuTimer(settings.mode) if self._device == "cpu" else None
        measurement = measure([*self._theirs, *right], settings, timer)
        return Contest(self.problem, checks, self.absent, measurement, facts)


def hold(
    problem: Problem,
    kernels: Mapping[str, Artifact | Configured],
    baselines: Sequence[Baseline],
    settings: TimingSettings | None,
    device: str = "cuda",
) -> Contest:
    """One contest in an arena of its own."""
    return Arena(problem, baselines, device).hold(kernels, settings)


def _ours(
    name: str, kernel: Artifact | Configured, problem: Problem, tensors: Tensors, expected: Expected
) -> Contender:
    def faults() -> AbstractContextManager[None]:
        return faults_named(kernel) if tensors.device.type == "cuda" else nullcontext()

    with faults():
        bind = kernel.prepare if isinstance(kernel, Configured) else partial(on_gpu, kernel)
        launch = bind(problem, tensors)

    def check() -> Check:
        tensors.poison()
        with faults():
            launch()
        return verify(expected, tensors.outputs, tensors.buffers)

    return Contender(name, launch, check)


def _theirs(baseline: Baseline, problem: Problem, tensors: Tensors, expected: Expected) -> Contender:
    run = baseline.prepare(problem, tensors)

    def check() -> Check:
        given = run()
        outputs = given if isinstance(given, tuple) else (given,)
        return verify(expected, dict(zip(problem.asked.outputs, outputs, strict=False)))

    return Contender(baseline.name, run, check)
