"""One kernel on one problem: run, checked, and measured beside the official one, or counted by the emulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flashladder.common import host
from flashladder.common.catalog import Implementation, results_of
from flashladder.common.compiler.artifact import Artifact
from flashladder.common.emulator import Report
from flashladder.common.measure import baselines, contest
from flashladder.common.measure.references import Configured
from flashladder.common.measure.timing import Measurement, TimingSettings
from flashladder.common.problem.check import Check, expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.records import records
from flashladder.common.records.records import Row
from flashladder.common.runtime.execute import on_emulator


@dataclass(frozen=True)
class Outcome:
    """What a run gave: to be judged, to be logged, to be shown."""

    kernel: Artifact | Configured
    problem: Problem
    check: Check
    figures: Row  # for the log
    facts: Mapping[str, str] = field(default_factory=dict)  # what a reference tells of its run
    report: Report | None = None  # the emulator's
    measurement: Measurement | None = None  # None where nothing was timed
    titles: Mapping[str, str] = field(default_factory=dict)  # of official kernels
    absent: Mapping[str, str] = field(default_factory=dict)  # official kernels that took no part, with the reason


def emulate(artifact: Artifact, problem: Problem, progress: Callable[..., None] | None = None) -> Outcome:
    """On the emulator, under the race detector."""
    tensors = make_inputs(problem)
    report = on_emulator(artifact, problem, tensors, progress=progress)
    check = verify(expect(problem, tensors), tensors.outputs, tensors.buffers)
    return Outcome(artifact, problem, check, records.of_report(report), report=report)


def measure(
    kernel: Artifact | Configured, problem: Problem, settings: TimingSettings | None, device: str = "cuda"
) -> Outcome:
    """Beside the official kernel; on the CPU, beside what torch computes there. Without settings nothing is timed."""
    on_gpu = device == "cuda"
    others = list(baselines.of(problem.operation, on_gpu).values())[: 1 if on_gpu else None]
    name = kernel.version
    held = contest.hold(problem, {name: kernel}, others, settings, device)
    facts, measurement = held.facts.get(name, {}), held.measurement
    if measurement is None:
        return Outcome(kernel, problem, held.checks[name], {}, facts, absent=held.absent)
    return Outcome(
        kernel,
        problem,
        measurement.checks[name],
        records.of_measurement(measurement, name, problem, others[0].version if others else ""),
        facts,
        measurement=measurement,
        titles={other.name: f"{other.title} {other.version}" for other in others},
        absent=held.absent,
    )


def log(implementation: Implementation, on_gpu: bool, outcome: Outcome) -> Path:
    """Adds a row to the log of runs, which is the path."""
    kernel = outcome.kernel
    place = records.of_place(on_gpu, host.title() if isinstance(kernel, Configured) else "emulator")
    made = records.runs(results_of([implementation]))
    asked = records.of_problem(outcome.problem)
    made.append([place | records.of_kernel(kernel) | asked | records.of_check(outcome.check) | outcome.figures])
    return made.path
