"""Compile a rung of the ladder, run it, check it, measure it, and log what came of it.

python tools/run_version.py 02                        on the GPU of this machine, or on the emulator
python tools/run_version.py 02 --config block_m=128 num_warps=8 --seqlen 1024
python tools/run_version.py --list                    the ladder
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

try:
    from rich.table import Table

    from flashladder.common import arguments as options
    from flashladder.common import catalog, display
    from flashladder.common.console import EXIT_ERROR, Parser, console, exit_with, progress, warn
except ImportError as error:
    sys.exit(f"{sys.executable} has no {error.name}: run `make venv`, then `.venv/bin/python tools/run_version.py`")

if TYPE_CHECKING:
    from flashladder.common.artifact import Artifact
    from flashladder.common.problem import Check, Problem
    from flashladder.common.records import Row

# Small enough for the emulator to end within a second; on a GPU, the size of a published benchmark.
EMULATOR_DEFAULTS = {"batch": 1, "num_heads": 2, "seqlen_q": 256}
GPU_DEFAULTS = {"batch": 4, "num_heads": 16, "seqlen_q": 4096}


def parser() -> Parser:
    """The options; what needs torch is imported later, so that a wrong one is reported at once."""
    summary, _, examples = (__doc__ or "").partition("\n\n")
    made = Parser(summary, epilog=examples)
    made.add_argument("version", nargs="?", help="a rung: 02, or swizzling")
    made.add_argument("--list", action="store_true", help="show the ladder")
    options.add_config(made)
    options.add_device(made)
    options.add_problem(made)
    options.add_timing(made)
    made.add_argument("--no-measure", action="store_true", help="on a GPU: run once and check, no timing")
    made.add_argument("--no-log", action="store_true", help="write no row to results/runs.csv")
    return made


@dataclass(frozen=True)
class Outcome:
    """What a run gave: to be judged, to be logged, to be shown."""

    check: Check
    row: Row
    tables: list[Table]


def main(arguments: argparse.Namespace) -> int:
    if arguments.list:
        console.print(display.ladder())
        return 0
    if arguments.version is None:
        parser().print_help()
        return EXIT_ERROR
    version = catalog.find(arguments.version)
    values = options.config_values(arguments.config)

    from flashladder.common import build, records, target

    place = target.resolve(arguments.device, arguments.gpu)
    problem = options.problem(arguments, **(GPU_DEFAULTS if place.on_gpu else EMULATOR_DEFAULTS))
    config = version.config_for(problem, **values)
    version.check(problem, config)
    artifact = build.build_one(version, config, place.arch)
    place.check(artifact)
    outcome = (_on_gpu if place.on_gpu else _on_emulator)(artifact, problem, arguments)

    console.print(display.summary(version, artifact, problem, place.title, outcome.check))
    for table in outcome.tables:
        console.print(table)
    if not arguments.no_log:
        log = records.runs()
        what = records.of_artifact(artifact) | records.of_problem(problem) | records.of_check(outcome.check)
        log.append([records.of_place(place.on_gpu) | what | outcome.row])
        console.print(f"[dim]logged to {log.path}")
    outcome.check.require(f"{version.name} with {config.name}")
    return 0


def _on_emulator(artifact: Artifact, problem: Problem, arguments: argparse.Namespace) -> Outcome:
    from flashladder.common import records
    from flashladder.common.execute import on_emulator
    from flashladder.common.problem import expect, make_inputs, verify

    tensors = make_inputs(problem)
    with progress("emulated CTAs") as update:
        report = on_emulator(artifact, problem, tensors, progress=update)
    check = verify(expect(problem, tensors), tensors.o, tensors.lse, tensors.buffers)
    return Outcome(check, records.of_report(report), [display.counters(report, problem), display.traffic(report)])


def _on_gpu(artifact: Artifact, problem: Problem, arguments: argparse.Namespace) -> Outcome:
    from flashladder.common import baselines, contest, records
    from flashladder.common.measure import Settings

    official = baselines.find(baselines.OFFICIAL)
    settings = None if arguments.no_measure else Settings(arguments.mode, arguments.rounds)
    name = artifact.version
    result = contest.hold(problem, {name: artifact}, [official], settings)
    for absent, reason in result.absent.items():
        warn(f"no ratio to {absent}: {reason}")
    if result.measurement is None:
        return Outcome(result.checks[name], {}, [])
    for note in result.measurement.notes():
        warn(note)
    row = records.of_measurement(result.measurement, name, problem, official.version)
    titles = {official.name: f"{official.title} {official.version}"}
    return Outcome(result.measurement.checks[name], row, [display.times(result.measurement, problem, titles)])


if __name__ == "__main__":
    exit_with(main, parser())
