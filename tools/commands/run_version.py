"""Compile a rung of the ladder or a reference, run it, check it, measure it, and log what came of it.

python tools/run_version.py 02                        on the GPU of this machine, or on the emulator
python tools/run_version.py 02 --config block_m=128 num_warps=8 --seqlen 1024
python tools/run_version.py triton --causal           a reference, on the GPU or on the CPU
python tools/run_version.py --list                    the ladders and the references
python tools/run_version.py my_idea --watch           beside the editor: a trial at every save
python tools/run_version.py my_idea --against 24      the verdict, which goes to the rung's log of what was tried
python tools/run_version.py my_idea --against 24 --drop                 the same, which goes to the log of rung 24
python tools/run_version.py 37 --against 37 --config num_stages=3       a configuration beside the default one
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.table import Table

from flashladder.common import catalog
from flashladder.common.console import EXIT_ERROR, Parser, console, progress, warn
from flashladder.common.errors import ConfigError, FlashLadderError
from flashladder.common.report import display
from flashladder.tools.commands import arguments as options

if TYPE_CHECKING:
    from flashladder.common.compiler.artifact import Artifact
    from flashladder.common.emulator import Report
    from flashladder.common.measure.references import Configured
    from flashladder.common.problem.check import Check
    from flashladder.common.problem.config import KernelConfig, Value
    from flashladder.common.problem.problem import Problem
    from flashladder.common.records.records import Row
    from flashladder.common.runtime.target import Target


def parser() -> Parser:
    """The options; what needs torch is imported later, so that a wrong one is reported at once."""
    made = Parser(__doc__)
    made.add_argument("version", nargs="?", help="a rung: 02, swizzling, or backward/03; or a reference: triton")
    made.add_argument("--list", action="store_true", help="show the ladders and the references")
    options.add_config(made)
    options.add_device(made)
    options.add_problem(made)
    options.add_no_lse(made)
    options.add_timing(made)
    made.add_argument("--untuned", action="store_true", help="the rung's default, not what was tuned for the GPU")
    made.add_argument("--no-measure", action="store_true", help="run once and check, no timing")
    made.add_argument("--verbose", action="store_true", help="all that the emulator counts, line by line")
    made.add_argument("--no-log", action="store_true", help="write no row to results/runs.csv")
    idea = made.add_argument_group("trials of an idea")
    idea.add_argument("--against", metavar="RUNG", help="compare with it, and keep the verdict with the rung")
    idea.add_argument("--watch", action="store_true", help="a trial at every save, against the rung's parent")
    idea.add_argument("--drop", action="store_true", help="the idea ends here: the verdict is kept with that rung")
    idea.add_argument("--note", default="", metavar="TEXT", help="what was tried, for the log's table")
    return made


@dataclass(frozen=True)
class Outcome:
    """What a run gave: to be judged, to be logged, to be shown."""

    check: Check
    row: Row
    tables: list[Table]
    facts: Mapping[str, str] = field(default_factory=dict)  # what a reference tells, or the cost model


@dataclass(frozen=True)
class Configuration:
    """How a rung is configured for a problem: by given values, or by what was tuned for the GPU, or by default."""

    version: catalog.Version
    values: Mapping[str, Value]
    place: Target
    untuned: bool

    def of(self, problem: Problem) -> tuple[KernelConfig, bool]:
        """The configuration, and whether it was tuned. Raises as `Version.check` does."""
        from flashladder.common.runtime import tuned

        wanted = not (self.values or self.untuned)
        winner = tuned.config(self.version, self.place.gpu.name, problem) if wanted else None
        config = winner or self.version.config_for(problem, self.place.gpu, **self.values)
        self.version.check(problem, config)
        return config, winner is not None


def main(arguments: argparse.Namespace) -> int:
    if arguments.list:
        return _list()
    if arguments.version is None:
        parser().print_help()
        return EXIT_ERROR
    if arguments.drop and not arguments.against:
        raise ConfigError("--drop keeps a verdict with the rung compared with: add --against RUNG")
    kernel = catalog.find_implementation(arguments.version)
    values = options.config_values(arguments.config)
    if isinstance(kernel, catalog.Reference):
        if arguments.watch or arguments.against:
            raise ConfigError(f"{kernel.name} is a reference: --watch and --against are for rungs, such as 24")
        return _run_reference(kernel, values, arguments)
    if arguments.watch or arguments.against:
        return _try(kernel, values, arguments)
    return _run_rung(kernel, values, arguments)


def _list() -> int:
    """All ladders and the references; a ladder that cannot be read hides no other."""
    code = 0
    for ladder in catalog.ladders():
        try:
            console.print(display.ladder(ladder))
        except ConfigError as error:
            warn(f"the ladder {ladder or 'of this repository'} cannot be shown: {error}")
            code = EXIT_ERROR
    console.print(display.references())
    return code


def _run_rung(version: catalog.Version, values: dict[str, Value], arguments: argparse.Namespace) -> int:
    from flashladder.common import compiler as build
    from flashladder.common.records import records
    from flashladder.common.runtime import target

    place = target.resolve(arguments.device, arguments.gpu)
    problem = options.problem(arguments, version.operation, "usual" if place.on_gpu else "small")
    configured = Configuration(version, values, place, arguments.untuned)
    config, is_tuned = configured.of(problem)
    artifact = build.build_one(version, config, place.arch)
    place.check(artifact)
    outcome = (
        _on_gpu(artifact, problem, arguments) if place.on_gpu else _emulated(artifact, problem, configured, arguments)
    )

    console.print(display.summary(version, artifact, problem, place.title, outcome.check, outcome.facts))
    for table in outcome.tables:
        console.print(table)
    if not arguments.no_log:
        _log(version, records.of_place(place.on_gpu) | records.of_artifact(artifact), problem, outcome)
    if is_tuned:
        console.print(
            f"[dim]configured as tuner/search.py tuned it for {place.gpu.name}; --untuned: the rung's default"
        )
    outcome.check.require(f"{version.name} with {config.name}")
    return 0


def _try(version: catalog.Version, values: dict[str, Value], arguments: argparse.Namespace) -> int:
    """A trial beside another rung: one, or one at every save."""
    from flashladder.common.report import sass as show
    from flashladder.common.runtime import target
    from flashladder.common.workshop import trial, tried, verdict, watch
    from flashladder.tuner.pair import PairTimer

    place = target.resolve(arguments.device, arguments.gpu)
    timer = PairTimer(place.gpu.name, arguments.mode, arguments.rounds) if place.on_gpu else None

    def idea(rung: catalog.Version) -> trial.Idea:
        parent = catalog.find(arguments.against) if arguments.against else rung.below()
        if parent is None:
            raise ConfigError(f"{rung.name} has no rung below: say what to compare it with, --against RUNG")
        problem = options.problem(arguments, rung.operation)
        return trial.compare(rung, parent, problem, place, values)

    first = idea(version)  # what cannot be compared is no matter of a save
    if timer:
        timer.warm_up(first.problem)
    try:
        if arguments.watch:
            with suppress(KeyboardInterrupt):
                watch.watch(version.name, idea, timer)
            return 0
        held = trial.hold(first, timer)
    finally:
        if timer:
            timer.stop()
    console.print(show.resources(held.parent, held.ours))
    for note in held.timing.notes if held.timing else ():
        warn(note)
    console.print(f"{version.address}: {verdict.in_words(held)}", style="bold", markup=False, soft_wrap=True)
    if untried := verdict.untried(first):
        console.print(untried, style="dim", soft_wrap=True)
    if not arguments.no_log:
        console.print(f"[dim]logged to {tried.record(held, arguments.note, arguments.drop)}", soft_wrap=True)
    return 0


def _run_reference(reference: catalog.Reference, values: dict[str, Value], arguments: argparse.Namespace) -> int:
    import torch

    from flashladder.common import host
    from flashladder.common.measure import references
    from flashladder.common.records import records

    device = references.device_for(reference, arguments.device)
    on_gpu = device == "cuda"
    problem = options.problem(arguments, reference.operation, "usual" if on_gpu else "small")
    config = reference.config_for(problem, **values)
    reference.check(problem, config)
    kernel = references.Configured(reference, config)
    outcome = _contest(kernel, problem, arguments, device)

    title = torch.cuda.get_device_name() if on_gpu else host.title()
    console.print(display.reference_summary(kernel, problem, title, outcome.check, outcome.facts))
    for table in outcome.tables:
        console.print(table)
    if not arguments.no_log:
        _log(reference, records.of_place(on_gpu, host.title()) | records.of_reference(kernel), problem, outcome)
    outcome.check.require(f"{reference.name} with {config.name}")
    return 0


def _log(kernel: catalog.Implementation, what: Row, problem: Problem, outcome: Outcome) -> None:
    from flashladder.common.records import records

    log = records.runs(catalog.results_of([kernel]))
    log.append([what | records.of_problem(problem) | records.of_check(outcome.check) | outcome.row])
    console.print(f"[dim]logged to {log.path}")


def _emulated(
    artifact: Artifact, problem: Problem, configured: Configuration, arguments: argparse.Namespace
) -> Outcome:
    from flashladder.common.problem.check import expect, verify
    from flashladder.common.problem.inputs import make_inputs
    from flashladder.common.records import records
    from flashladder.common.runtime.execute import on_emulator

    tensors = make_inputs(problem)
    with progress("emulated CTAs") as update:
        report = on_emulator(artifact, problem, tensors, progress=update)
    check = verify(expect(problem, tensors), tensors.outputs, tensors.buffers)
    every = arguments.verbose
    tables = filter(None, [display.counters(report, problem, every), display.traffic(report, every)])
    predicted = {} if arguments.no_measure else {"predicted": _predicted(configured, report, arguments)}
    return Outcome(check, records.of_report(report), [*tables], predicted)


def _predicted(configured: Configuration, report: Report, arguments: argparse.Namespace) -> str:
    """The time of what the same command would measure on the GPU, by the cost model."""
    from flashladder.common.compiler import build_one
    from flashladder.common.predict.agreement import conflict_factor
    from flashladder.tuner import model

    gpu = configured.place.gpu
    try:
        problem = options.problem(arguments, configured.version.operation)
        config, _ = configured.of(problem)
        artifact = build_one(configured.version, config, gpu.arch)
        time_us = model.time_us(problem, artifact, gpu, conflict_factor(report))
    except FlashLadderError as error:
        return f"nothing: {error}"
    named = problem.name.replace(",", ", ")
    told = f"by the cost model: nothing was timed; {named}; {model.experience(artifact)}"
    return f"{time_us:,.0f} us on {gpu.title}, {told}"


def _on_gpu(artifact: Artifact, problem: Problem, arguments: argparse.Namespace) -> Outcome:
    return _contest(artifact, problem, arguments, "cuda")


def _contest(kernel: Artifact | Configured, problem: Problem, arguments: argparse.Namespace, device: str) -> Outcome:
    """Beside the official kernel; on the CPU, beside what torch computes there."""
    from flashladder.common.measure import baselines, contest
    from flashladder.common.measure.timing import TimingSettings
    from flashladder.common.records import records

    on_gpu = device == "cuda"
    others = list(baselines.of(problem.operation, on_gpu).values())[: 1 if on_gpu else None]
    settings = None if arguments.no_measure else TimingSettings(arguments.mode, arguments.rounds)
    name = kernel.version
    result = contest.hold(problem, {name: kernel}, others, settings, device)
    for absent, reason in result.absent.items():
        warn(f"no ratio to {absent}: {reason}")
    if result.measurement is None:
        return Outcome(result.checks[name], {}, [], result.facts.get(name, {}))
    for note in result.measurement.notes():
        warn(note)
    row = records.of_measurement(result.measurement, name, problem, others[0].version if others else "")
    titles = {other.name: f"{other.title} {other.version}" for other in others}
    times = display.times(result.measurement, problem, titles)
    return Outcome(result.measurement.checks[name], row, [times], result.facts.get(name, {}))
