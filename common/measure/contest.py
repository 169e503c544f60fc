"""Our kernels against official ones on one problem: the same tensors, checked, then timed together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch

from flashladder.common.catalog import kind_of
from flashladder.common.compiler.artifact import Artifact
from flashladder.common.errors import DeviceError, first_line
from flashladder.common.measure import clocks, l2
from flashladder.common.measure.baselines import Baseline, RunOnce
from flashladder.common.measure.cpu_timer import CpuTimer
from flashladder.common.measure.references import Configured, Prepared
from flashladder.common.measure.spot import Stage
from flashladder.common.measure.timing import Contender, Measurement, TimingSettings, measure
from flashladder.common.problem.check import Check, expect, verify
from flashladder.common.problem.families import NORMAL
from flashladder.common.problem.inputs import Tensors, allocate, make_inputs
from flashladder.common.problem.kind import SHORT
from flashladder.common.problem.problem import DTYPES, LSE, Problem
from flashladder.common.runtime.execute import on_gpu
from flashladder.common.runtime.gpu import faults_named

# Families of inputs that a kernel must be right on to be timed, whichever end of the keys it begins with.
HARD = ("sinks", "maximum_in_turn", "falling_steeply", "rising_steeply")


@dataclass(frozen=True)
class Contest:
    """What came of it. Ratios refer to the first baseline that takes the problem; without any, to the first kernel."""

    problem: Problem
    checks: dict[str, Check]  # of our kernels
    absent: dict[str, str]  # baselines that are missing, or refuse the problem or how it is timed, with the reason
    measurement: Measurement | None  # of those whose output is right; None where nothing was timed
    facts: dict[str, Mapping[str, str]] = field(default_factory=dict)  # what references tell of their run

    @property
    def remarks(self) -> list[str]:
        """What a reader of the figures must know: which kernels are wrong, and what disturbed the GPU."""
        name, checks = self.problem.name, self.checks.items()
        wrong = [f"{k} is wrong, and not timed, at {name}: {fault}" for k, check in checks for fault in check.faults]
        return [*wrong, *(f"{name}: {note}" for note in (self.measurement.notes() if self.measurement else ()))]


def hard_problems(problem: Problem) -> list[Problem]:
    """One sequence of it with other inputs, which show what normal ones hide: coarse arithmetic, work that is left out.

    The families make weights large and small, and maxima far from the first one. Flat scores make O a small mean of all
    of V, which no family does.
    """
    one = problem.asked.one_sequence(problem)
    usual = replace(one, family=NORMAL, softmax_scale=problem.head_dim**-0.5)
    flat = replace(usual, softmax_scale=usual.softmax_scale / 16)
    return [flat, *(replace(usual, family=name) for name in HARD if name in problem.asked.families_of(problem))]


class ProblemInstance:
    """A problem with its tensors and its exact answer; `ulps` of the largest output are allowed on top."""

    def __init__(self, problem: Problem, device: str, ulps: int = 0) -> None:
        self.problem = problem
        self.tensors = make_inputs(problem, device)
        self._copied: list[Tensors] = []
        expected = expect(problem, self.tensors)
        ulp = torch.finfo(DTYPES[problem.dtype]).eps
        allowed = {
            name: 0.0 if problem.tensors[name].dtype == torch.float32 else ulps * ulp * float(exact.abs().max())
            for name, exact in expected.exact.items()
        }
        tolerances = {name: tolerance + allowed[name] for name, tolerance in expected.tolerances.items()}
        self.expected = replace(expected, tolerances=tolerances)

    @cached_property
    def stage(self) -> Stage:
        """For spot checks."""
        return Stage(self.tensors, self.expected)

    def official(self, baseline: Baseline) -> Contender:
        """A baseline on these tensors."""
        run = baseline.prepare(self.problem, self.tensors)

        def again(l2_bytes: int) -> list[RunOnce]:
            return [baseline.prepare(self.problem, tensors) for tensors in self._copies(l2_bytes)]

        def verified(launch: RunOnce) -> Check:
            given = launch()._asdict()
            return verify(self.expected, {name: given[name] for name in self.problem.outputs if name != LSE})

        return Contender(baseline.name, run, verified, is_official=True, elsewhere=again)

    def ours(self, name: str, kernel: Artifact | Configured, *, timed: bool) -> Contender:
        """A kernel on these tensors. DeviceError where it faults."""

        def faults() -> AbstractContextManager[None]:
            return faults_named(kernel) if self.tensors.device.type == "cuda" else nullcontext()

        with faults(), clocks.kept(name):
            bind = kernel.prepare if isinstance(kernel, Configured) else partial(on_gpu, kernel)
            launch = bind(self.problem, self.tensors)

        def again(l2_bytes: int) -> list[Callable[[], object]]:
            with faults():
                return [bind(self.problem, tensors) for tensors in self._copies(l2_bytes)]

        def verified(launch: Callable[[], object]) -> Check:
            self.tensors.poison()
            with faults(), clocks.kept(name):
                launch()
            return verify(self.expected, self.tensors.outputs, self.tensors.buffers)

        return Contender(name, launch, verified, self.stage if timed else None, elsewhere=again)

    def _copies(self, l2_bytes: int) -> list[Tensors]:
        """Of the tensors, so many that an L2 of so many bytes has nothing of the first ones when they come again."""
        for _ in range(l2.copies(self.problem.asked.bytes_moved(self.problem), l2_bytes) - len(self._copied)):
            copied = allocate(self.problem, self.tensors.device)
            for name in copied.by_name.keys() - copied.outputs.keys():
                copied.by_name[name].copy_(self.tensors.by_name[name])
            self._copied.append(copied)
        return self._copied


class Arena:
    """A problem's tensors, its exact answer and its official kernels, for as many contests as are wanted.

    DeviceError without a GPU; on the device cpu, references alone can hold contests with CPU_BASELINES.
    """

    def __init__(self, problem: Problem, baselines: Sequence[Baseline], device: str = "cuda") -> None:
        self.problem = problem
        self._device = device
        self.absent = {b.name: reason for b in baselines if (reason := b.missing() or b.refusal(problem))}
        self._instance = ProblemInstance(problem, device)
        self._theirs: list[Contender] = []
        for baseline in baselines:
            if baseline.name not in self.absent:
                self._bind(baseline)

    def _bind(self, baseline: Baseline) -> None:
        """Lets it take part, unless it fails or is wrong: what a package was built with is known to no one."""
        try:
            contender = self._instance.official(baseline)
            faults = contender.check().faults
        except DeviceError:
            raise
        except Exception as error:  # a foreign package may fail in any way
            self.absent[baseline.name] = f"{baseline.title} failed: {first_line(error)}"
        else:
            if faults:
                self.absent[baseline.name] = f"{baseline.title} is wrong at {self.problem.name}: {faults[0]}"
            else:
                self._theirs.append(contender)

    def hold(self, kernels: Mapping[str, Artifact | Configured], settings: TimingSettings | None) -> Contest:
        """Check the kernels and, with settings, time those that are right. DeviceError at a fault."""
        timed = settings is not None
        ours = [self._instance.ours(name, kernel, timed=timed) for name, kernel in kernels.items()]
        checks = {kernel.name: kernel.check() for kernel in ours}
        if timed:
            checks = {name: self._on_hard_inputs(name, kernels[name], check) for name, check in checks.items()}
        facts = {kernel.name: kernel.launch.facts() for kernel in ours if isinstance(kernel.launch, Prepared)}
        right = [kernel for kernel in ours if checks[kernel.name].passed]
        if settings is None or not right:
            return Contest(self.problem, checks, self.absent, None, facts)
        timer = CpuTimer(settings.mode) if self._device == "cpu" else None
        measurement = measure([*self._theirs, *right], settings, timer)
        return Contest(self.problem, checks, self.absent | measurement.absent, measurement, facts)

    def _on_hard_inputs(self, name: str, kernel: Artifact | Configured, check: Check) -> Check:
        """The check, with what is wrong on other inputs."""
        if not check.passed:
            return check
        faults = [
            f"{fault}, with other inputs: {instance.problem.name}"
            for instance in self._hard_instances
            for fault in instance.ours(name, kernel, timed=False).check().faults
        ]
        return replace(check, faults=tuple(faults))

    @cached_property
    def _hard_instances(self) -> list[ProblemInstance]:
        """Where few keys count, 16-bit torch may be exact, which no kernel need be."""
        return [ProblemInstance(problem, self._device, ulps=1) for problem in hard_problems(self.problem)]


def to_warm(baselines: Sequence[Baseline], problems: Sequence[Problem]) -> list[tuple[Baseline, Problem]]:
    """Those that compile their kernels, each with the smallest problem of each kind that it takes."""
    pairs: dict[object, tuple[Baseline, Problem]] = {}
    for baseline in baselines:
        if baseline.compiles and not baseline.missing():
            for problem in sorted(problems, key=lambda each: each.flops):
                if not baseline.refusal(problem):
                    kind = replace(kind_of(problem), length=SHORT)  # of any length
                    same = (baseline.name, kind, problem.num_heads // problem.num_heads_k)
                    pairs.setdefault(same, (baseline, problem))
    return list(pairs.values())


def warm(baseline: Baseline, problem: Problem, device: str = "cuda") -> None:
    """Has it compile what it needs for problems of this kind. Whether it can, a contest tells."""
    with suppress(Exception):  # a foreign package may fail in any way
        baseline.prepare(problem, make_inputs(problem, device))()


def hold(
    problem: Problem,
    kernels: Mapping[str, Artifact | Configured],
    baselines: Sequence[Baseline],
    settings: TimingSettings | None,
    device: str = "cuda",
) -> Contest:
    """One contest in an arena of its own."""
    return Arena(problem, baselines, device).hold(kernels, settings)
