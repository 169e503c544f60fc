"""Compile a rung of the ladder or a reference, run it, check it, measure it, and log what came of it.

python tools/run_version.py 02                        on the GPU of this machine, or on the emulator
python tools/run_version.py 02 --config block_m=128 num_warps=8 --seqlen 1024
python tools/run_version.py triton --causal           a reference, on the GPU or on the CPU
python tools/run_version.py --list                    the ladders and the references
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.table import Table

from flashladder.common import arguments as options
from flashladder.common import catalog
from flashladder.common.console import EXIT_ERROR, Parser, console, progress, warn
from flashladder.common.report import display

if TYPE_CHECKING:
    from flashladder.common.build.artifact import Artifact
    from flashladder.common.config import Value
    from flashladder.common.problem import Check, Problem
    from flashladder.common.references import Configured
    from flashladder.common.results.records import Row

# Small enough for the emulator to end within a second; on a GPU, the size of a published benchmark.
EMULATOR_DEFAULTS = {"batch": 1, "num_heads": 2, "seqlen_q": 256}
GPU_DEFAULTS = {"batch": 4, "num_heads": 16, "seqlen_q": 4096}


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
    made.add_argument("--no-log", action="store_true", help="write no row to results/runs.csv")
    return made


@dataclass(frozen=True)
class Outcome:
    """What a run gave: to be judged, to be logged, to be shown."""

    check: Check
    row: Row
    tables: list[Table]
    facts: Mapping[str, str] = field(default_factory=dict)  # what a reference tells


def main(arguments: argparse.Namespace) -> int:
    if arguments.list:
        for ladder in catalog.ladders():
            console.print(display.ladder(ladder))
        console.print(display.references())
        return 0
    if arguments.version is None:
        parser().print_help()
        return EXIT_ERROR
    kernel = catalog.find_implementation(arguments.version)
    values = options.config_values(arguments.config)
    if isinstance(kernel, catalog.Reference):
        return _run_reference(kernel, values, arguments)
    return _run_rung(kernel, values, arguments)


def _run_rung(version: catalog.Version, values: dict[str, Value], arguments: argparse.Namespace) -> int:
    from flashladder.common import build
    from flashladder.common.results import records
    from flashladder.common.run import target, tuned

    place = target.resolve(arguments.device, arguments.gpu)
    problem = options.problem(arguments, version.operation, **(GPU_DEFAULTS if place.on_gpu else EMULATOR_DEFAULTS))
    gpu = None if values or arguments.untuned else place.gpu  # whose winner is wanted
    winner = tuned.config(version, gpu.name, problem) if gpu else None
    config = winner or version.config_for(problem, place.gpu, **values)
    version.check(problem, config)
    artifact = build.build_one(version, config, place.arch)
    place.check(artifact)
    outcome = (_on_gpu if place.on_gpu else _on_emulator)(artifact, problem, arguments)

    console.print(display.summary(version, artifact, problem, place.title, outcome.check))
    for table in outcome.tables:
        console.print(table)
    if not arguments.no_log:
        _log(records.of_place(place.on_gpu) | records.of_artifact(artifact), problem, outcome)
    if winner and gpu:
        console.print(f"[dim]configured as tuner/search.py tuned it for {gpu.name}; --untuned: the rung's default")
    outcome.check.require(f"{version.name} with {config.name}")
    return 0


def _run_reference(reference: catalog.Reference, values: dict[str, Value], arguments: argparse.Namespace) -> int:
    import torch

    from flashladder.common import host, references
    from flashladder.common.results import records

    device = references.device_for(reference, arguments.device)
    on_gpu = device == "cuda"
    problem = options.problem(arguments, reference.operation, **(GPU_DEFAULTS if on_gpu else EMULATOR_DEFAULTS))
    config = reference.config_for(problem, **values)
    reference.check(problem, config)
    kernel = references.Configured(reference, config)
    outcome = _contest(kernel, problem, arguments, device)

    title = torch.cuda.get_device_name() if on_gpu else host.title()
    console.print(display.reference_summary(kernel, problem, title, outcome.check, outcome.facts))
    for table in outcome.tables:
        console.print(table)
    if not arguments.no_log:
        _log(records.of_place(on_gpu, host.title()) | records.of_reference(kernel), problem, outcome)
    outcome.check.require(f"{reference.name} with {config.name}")
    return 0


def _log(what: Row, problem: Problem, outcome: Outcome) -> None:
    from flashladder.common.results import records

    log = records.runs()
    log.append([what | records.of_problem(problem) | records.of_check(outcome.check) | outcome.row])
    console.print(f"[dim]logged to {log.path}")


def _on_emulator(artifact: Artifact, problem: Problem, arguments: argparse.Namespace) -> Outcome:
    from flashladder.common.problem import expect, make_inputs, verify
    from flashladder.common.results import records
    from flashladder.common.run.execute import on_emulator

    tensors = make_inputs(problem)
    with progress("emulated CTAs") as update:
        report = on_emulator(artifact, problem, tensors, progress=update)
    check = verify(expect(problem, tensors), tensors.outputs, tensors.buffers)
    return Outcome(check, records.of_report(report), [display.counters(report, problem), display.traffic(report)])


def _on_gpu(artifact: Artifact, problem: Problem, arguments: argparse.Namespace) -> Outcome:
    return _contest(artifact, problem, arguments, "cuda")


def _contest(kernel: Artifact | Configured, problem: Problem, arguments: argparse.Namespace, device: str) -> Outcome:
    """Beside the official kernel; on the CPU, beside what torch computes there."""
    from flashladder.common.measure import baselines, contest
    from flashladder.common.measure.timing import TimingSettings
    from flashladder.common.results import records

    official = [baselines.official(problem.operation)] if problem.operation in baselines.OFFICIAL else []
    others = official if device == "cuda" else list(baselines.CPU_BASELINES.values())
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
