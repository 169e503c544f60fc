"""One kernel on one problem: run, checked, and measured beside the official one, or counted by the emulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from flashladder.common import host
from flashladder.common.catalog import Implementation, results_of
from flashladder.common.compiler import build_one
from flashladder.common.compiler.artifact import Artifact
from flashladder.common.console import progress
from flashladder.common.emulator import Report
from flashladder.common.errors import FlashLadderError
from flashladder.common.measure import baselines, contest, references
from flashladder.common.measure.entrants import Entrant, ReferenceEntrant
from flashladder.common.measure.references import Configured
from flashladder.common.measure.timing import Measurement, TimingSettings
from flashladder.common.predict import outlook
from flashladder.common.predict.outlook import Outlook
from flashladder.common.problem.check import Check, expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.records import records
from flashladder.common.records.records import Row
from flashladder.common.runtime.execute import on_emulator
from flashladder.common.runtime.target import Target

Ask = Callable[[Literal["usual", "small"]], Problem]  # for the problem to run, of one of its operation's own sizes


@dataclass(frozen=True)
class Outcome:
    """What a run gave: to be judged, to be logged, to be shown."""

    kernel: Artifact | Configured
    problem: Problem
    check: Check
    figures: Row  # for the log
    facts: Mapping[str, str] = field(default_factory=dict)  # what more there is to say of the run, by what it is of
    report: Report | None = None  # the emulator's
    measurement: Measurement | None = None  # None where nothing was timed
    predicted: Outlook | None = None  # in the place of a time, where there is one
    titles: Mapping[str, str] = field(default_factory=dict)  # of official kernels
    absent: Mapping[str, str] = field(default_factory=dict)  # official kernels that took no part, with the reason
    on_gpu: bool = False
    device: str = ""  # in words
    unseeing: int | None = None  # rows that see no key, where a mask or a score was checked

    def remarks(self) -> list[str]:
        """What a reader of its figures must know."""
        absent = [f"no ratio to {name}: {reason}" for name, reason in self.absent.items()]
        return absent + (list(self.measurement.notes()) if self.measurement else [])


def run(entrant: Entrant, ask: Ask, place: Target, settings: TimingSettings | None) -> Outcome:
    """A rung, on the GPU beside the official kernel, or on the emulator.

    The emulator is given a small problem, and the cost model tells what the usual one would take on the GPU. Without
    settings nothing is timed or predicted.
    """
    problem = ask("usual" if place.on_gpu else "small")
    artifact = build_one(entrant.version, entrant.config(problem, place.gpu), place.arch)
    place.check(artifact)
    facts = {}
    if place.on_gpu:
        outcome = measure(artifact, problem, settings)
    else:
        with progress("emulated CTAs") as update:
            outcome = emulate(artifact, problem, update)
        if outcome.report and settings:
            try:
                predicted = outlook.predict(entrant, partial(ask, "usual"), place.gpu, outcome.report)
            except FlashLadderError as error:
                facts["predicted"] = f"nothing: {error}"
            else:
                outcome, config = replace(outcome, predicted=predicted), predicted.artifact.config
                other = "" if config == artifact.config else f"; configuration {config.name.replace(',', ', ')}"
                facts["predicted"] = f"{predicted}{other}"
    if entrant.winner(problem):
        nearest = "" if entrant.tuned_for == place.gpu.name else f", the nearest to {place.gpu.name} that has winners"
        facts["tuned"] = f"by `flashladder search`, for {entrant.tuned_for}{nearest}; --untuned: the rung's default"
    return replace(outcome, facts=facts, on_gpu=place.on_gpu, device=place.title)


def run_reference(entrant: ReferenceEntrant, ask: Ask, wanted: str, settings: TimingSettings | None) -> Outcome:
    """A reference, on the device that is wanted: auto, gpu or cpu."""
    device = references.device_for(entrant.reference, wanted)
    on_gpu = device == "cuda"
    problem = ask("usual" if on_gpu else "small")
    outcome = measure(entrant.configured(problem), problem, settings, device)
    return replace(outcome, on_gpu=on_gpu, device=torch.cuda.get_device_name() if on_gpu else host.title())


def emulate(artifact: Artifact, problem: Problem, update: Callable[..., None] | None = None) -> Outcome:
    """On the emulator, under the race detector."""
    tensors = make_inputs(problem)
    report = on_emulator(artifact, problem, tensors, progress=update)
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


def log(implementation: Implementation, outcome: Outcome) -> Path:
    """Adds a row to the log of runs, which is the path."""
    kernel = outcome.kernel
    elsewhere = host.title() if isinstance(kernel, Configured) else "emulator"
    place = records.of_place(outcome.on_gpu, elsewhere)
    made = records.runs(results_of([implementation]))
    asked = records.of_problem(outcome.problem)
    made.append([place | records.of_kernel(kernel) | asked | records.of_check(outcome.check) | outcome.figures])
    return made.path
