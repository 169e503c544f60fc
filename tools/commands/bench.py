"""Time rungs of the ladder and references against official kernels, side by side, over shapes.

flashladder bench 07 16
flashladder bench 16 16@block_m=128,num_warps=8 --baselines fa2,cudnn --seqlens 512..16384 --causal both
flashladder bench 16 --seqlens 4096 --rounds 8 --brief      a quick look
flashladder bench 24 47 --causal yes --window 4096 --softcap 30 --baselines flash-attn,fa3
flashladder bench mla/05 --mode graph --seqlens 4096 --tokens 524288     launches in a CUDA graph
flashladder bench c py_fa2 --device cpu --seqlens 1024 --tokens 1024 --heads 2
flashladder bench backward --cells all     what calls launch beside every official kernel that is installed

A kernel is a rung, a reference, or an operation: of that, each problem's rung is the one that calls launch for it. With
--cells the problems are those of the ladder's ladder.yaml, timed in the mode that stands there. They go to the log
LADDER_GPU, of which `flashladder dashboard` makes a page and a picture. Each cell is logged as soon as it is done.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flashladder.common import catalog
from flashladder.common.console import EXIT_ERROR, Parser, UsageError, aside, console, duration, progress, warn
from flashladder.common.errors import ConfigError
from flashladder.common.report import display, listing
from flashladder.tools.commands import arguments as options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashladder.common.compiler.artifact import Artifact
    from flashladder.common.measure.baselines import Baseline
    from flashladder.common.measure.cells import Cell
    from flashladder.common.measure.contest import Contest
    from flashladder.common.measure.references import Configured
    from flashladder.common.problem.problem import Problem
    from flashladder.common.report.answer import Findings

SECONDS = {"cell": 5, "warming": 10}  # about what a cell takes, and what a kernel that a baseline compiles


def parser() -> Parser:
    """The options."""
    made = Parser(__doc__)
    made.add_argument(
        "kernels", nargs="*", metavar="KERNEL", help="a rung, a reference or an operation, @ a configuration"
    )
    made.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="the cpu is for references")
    made.add_argument(
        "--baselines",
        help="first the one that ratios refer to (default: the official one; on a cpu, or of cells: all)",
    )
    made.add_argument("--list-baselines", action="store_true", help="show the official kernels, and how to get them")
    made.add_argument("--cells", metavar="NAME[,NAME]", help="groups of the ladder's cells, or all; instead of shapes")
    options.add_shapes(made, seqlens="512..16384")
    options.add_no_lse(made)
    options.add_bounds(made)
    options.add_config(made)
    options.add_timing(made, None)
    made.add_argument("--brief", action="store_true", help="only the last table, one line a kernel")
    made.add_argument("--out", type=Path, metavar="FILE", help="write what is printed to a file too")
    made.add_argument("--log", metavar="NAME", help="which log of results/ (default: bench; of cells: LADDER_GPU)")
    made.add_argument("--no-log", action="store_true", help="write nothing to results/")
    options.add_json(made)
    return made


def main(arguments: argparse.Namespace) -> int:
    if arguments.list_baselines:
        console.print(listing.baselines())
        return 0
    if not arguments.kernels:
        raise UsageError

    from flashladder.common.measure import contest
    from flashladder.common.measure.entrants import assemble_all, parse
    from flashladder.common.measure.timing import TimingSettings
    from flashladder.common.records import records
    from flashladder.common.report import cell_tables

    entrants = [parse(text, options.config_values(arguments.config), arguments.device) for text in arguments.kernels]
    on_gpu, operation = arguments.device == "gpu", catalog.one_operation(entrant.operation for entrant in entrants)
    official = _official(arguments, operation, on_gpu)
    settings = TimingSettings(arguments.mode or "hot", arguments.rounds, arguments.seed)
    folder, cells = catalog.results_of(entrant.kernel for entrant in entrants), _cells(arguments, operation)
    run, log = records.new_run(), records.bench(arguments.log or _log(operation, cells), folder)
    contests: list[Contest] = []
    rows: list[records.Row] = []
    problems = [*cells] or options.shapes(arguments, operation)
    lineup, left_out = assemble_all(entrants, problems, arguments.device)
    for reason in dict.fromkeys(left_out):
        warn(reason)
    if on_gpu:
        _warm(official, [*lineup], tell=bool(cells))
    for number, (problem, kernels) in enumerate(lineup.items(), start=1):
        if cell := cells.get(problem):
            console.print(f"{number} of {len(lineup)}: {cell.title}", soft_wrap=True)
            settings = replace(settings, mode=arguments.mode or cell.mode)
        result = contest.hold(problem, kernels, official, settings, "cuda" if on_gpu else "cpu")
        contests.append(result)
        if arguments.json:
            _tell(arguments.json, result, kernels, on_gpu)
        for remark in result.remarks:
            warn(remark)
        if result.measurement and not (arguments.brief or cell):
            console.print(f"\n{problem.name}", style="bold")
            console.print(display.times(result.measurement, problem))
        rows += (of_contest := [*records.of_contest(result, run, kernels, on_gpu, cell).values()])
        if not arguments.no_log:
            log.append(of_contest)
            if result.measurement:
                records.samples(run, folder).append(records.of_samples(result.measurement, run, problem))
    for absent in dict.fromkeys(f"{name}: {reason}" for c in contests for name, reason in c.absent.items()):
        warn(f"no baseline {absent}")
    for table in cell_tables.of_run(rows) if cells else display.overview(contests):
        console.print(table)
    if not arguments.no_log:
        log.seal()
        aside(f"logged to {log.path}, samples to {records.samples(run, folder).path}")
    if arguments.out:
        arguments.out.write_text(console.export_text())
    return EXIT_ERROR if any(not check.passed for result in contests for check in result.checks.values()) else 0


def _tell(findings: Findings, result: Contest, kernels: Mapping[str, Artifact | Configured], on_gpu: bool) -> None:
    """What a contest gave, for programs."""
    import torch

    from flashladder.common import host
    from flashladder.common.report import answer

    device = torch.cuda.get_device_name() if on_gpu else host.title()
    faults = [fault for name, check in result.checks.items() for fault in answer.faults_of(name, check)]
    findings.add(answer.of_contest(result, kernels, device), faults)


def _official(arguments: argparse.Namespace, operation: str, on_gpu: bool) -> list[Baseline]:
    """The baselines that are asked for, or the usual ones."""
    from flashladder.common.measure import baselines

    known = baselines.of(operation, on_gpu)
    if arguments.baselines:
        return [baselines.find(name, operation, on_gpu) for name in arguments.baselines.split(",") if name]
    if arguments.cells:
        return [baseline for baseline in known.values() if not baseline.missing()]
    return [baselines.official(operation)] if on_gpu else [*known.values()]


def _cells(arguments: argparse.Namespace, operation: str) -> dict[Problem, Cell]:
    """Those that are asked for, by their problems. ConfigError where shapes are, too."""
    if not arguments.cells:
        return {}
    from flashladder.common.measure.cells import cells

    if given := options.of_problems(arguments, parser()):
        raise ConfigError(f"--cells {arguments.cells} says all of the problems: leave out {', '.join(given)}")
    return {cell.problem: cell for cell in cells(operation, arguments.cells.split(","))}


def _log(operation: str, cells: Mapping[Problem, Cell]) -> str:
    """Where rows go that nobody named a log for."""
    from flashladder.common.records.run_files import SCRATCH
    from flashladder.common.runtime import target

    if not cells:
        return SCRATCH
    return f"{catalog.ladder_name(operation)}_{target.resolve('gpu', None).gpu.name}"


def _warm(official: Sequence[Baseline], problems: Sequence[Problem], tell: bool) -> None:
    """What baselines compile, before anything is timed; may tell how long all will take."""
    from flashladder.common.measure import contest

    pairs = contest.to_warm(official, problems)
    seconds = len(problems) * SECONDS["cell"] + len(pairs) * SECONDS["warming"]
    what = f", after {len(pairs)} kernels that official libraries compile first" if pairs else ""
    if tell:
        console.print(f"{len(problems)} problems{what}: about {duration(seconds)}", soft_wrap=True)
    with progress("compiled by official libraries") as update:
        for number, (baseline, problem) in enumerate(pairs):
            update(number, len(pairs), f"{baseline.title}, {problem.name}")
            contest.warm(baseline, problem)
