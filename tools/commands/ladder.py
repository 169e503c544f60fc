"""Measure the whole ladder on this machine's GPU in one run, beside the field, for the README and the dashboard.

flashladder ladder                              every rung, six sequence lengths, bf16 and fp16: about 6 minutes
flashladder ladder --budget 120 --dtypes bf16   a coarser look
flashladder ladder 08 16                        two rungs: a run that is logged, and too small for the README

Every rung is timed twice: in its own configuration (own), which is what was tuned for this GPU or else the rung's
default, and in one that all the rungs take (fixed), so that the technique shows apart from the tuning. Beside them are
FlashAttention-2, to which ratios refer, and the kernels of --beside that are installed. All of them run in the same
rounds, on the same tensors, and the times of the rounds are kept: a step from rung to rung is computed from those.

The rows go to a file in results/runs as soon as a shape is done. A run that was killed, or that a time limit ended, is
taken up where it was, on a card of this kind with the same kernels and software; otherwise another begins. A shape is
of one card, on which the baseline of its ratios ran in the same rounds. The largest run is what is published, and one
on another card, in the same file, stands beside it; one that heat slowed down in more than 3 % of its samples is not.
FlashAttention-3 takes part where its package flash_attn_interface is on PYTHONPATH.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from flashladder.common import catalog
from flashladder.common.console import EXIT_ERROR, Parser, aside, console, warn
from flashladder.common.errors import ConfigError
from flashladder.common.measure.entrants import Entrant, ReferenceEntrant, assemble_all
from flashladder.common.problem.config import listing, parse_values
from flashladder.tools.commands import arguments as options

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from flashladder.common.catalog import Version
    from flashladder.common.problem.problem import Problem
    from flashladder.common.records.run_files import RunLog
    from flashladder.common.studies.experiments.ladder import Kernels

# 01 to 16 all take it. Fragments and their double buffer are the techniques of 04 and 05; the tile stays.
FIXED_CONFIG = "block_m=64,block_n=64,num_warps=4,q_fragments=2,k_fragments=2,v_fragments=2,double_buffer=true"
BESIDE = "cudnn,fa3,fa4,triton,cute"


def parser() -> Parser:
    """The options."""
    made = Parser(__doc__)
    made.add_argument("rungs", nargs="*", metavar="RUNG", help="or a ladder: backward; default: all of the first")
    made.add_argument("--seqlens", default="512..16384", help="512..4096 doubles; or a list, 512,4096")
    made.add_argument("--tokens", type=int, default=16384, help="batch x seqlen (default: 16384)")
    made.add_argument("--dtypes", default="bf16,fp16", help="default: bf16,fp16")
    made.add_argument("--fixed", default=FIXED_CONFIG, metavar="CONFIG", help=f"default: {FIXED_CONFIG}")
    made.add_argument("--untuned", action="store_true", help="own: the rung's default, not what was tuned for the GPU")
    made.add_argument(
        "--budget", type=options.above_zero, default=300, metavar="SECONDS", help="for all timing (default: 300)"
    )
    options.add_rounds(made, "rounds of each shape, instead of a budget")
    made.add_argument("--beside", default=BESIDE, metavar="NAMES", help=f"official and reference kernels: {BESIDE}")
    made.add_argument("--again", action="store_true", help="a run of its own, whatever is there already")
    return made


def main(arguments: argparse.Namespace) -> int:
    versions = catalog.select(arguments.rungs)
    operation = catalog.one_operation(version.operation for version in versions)
    fixed, lengths = parse_values(arguments.fixed), options.lengths(arguments.seqlens)

    from flashladder.common.measure.timing import TimingSettings
    from flashladder.common.records import records
    from flashladder.common.report import ladder_tables
    from flashladder.common.runtime import target
    from flashladder.common.studies.experiments import ladder

    place = target.resolve("gpu", None)
    name = place.gpu.name
    the_ladder, folder = _the_ladder(versions), catalog.results_of(versions)
    log = records.ladder(name, catalog.FIRST if versions[0].home else the_ladder, folder)
    problems = list(ladder.problems(arguments.dtypes.split(","), lengths, arguments.tokens, operation))
    official, references = ladder.beside(filter(None, arguments.beside.split(",")), operation)
    gpu = None if arguments.untuned else name  # whose winners are wanted
    entrants: list[Entrant | ReferenceEntrant] = [*ladder.entrants(versions, fixed, place.arch, gpu), *references]
    assembled, left_out = assemble_all(entrants, problems, "gpu")
    field = ladder.without_slow(assembled)
    for reason in dict.fromkeys(left_out):
        warn(reason)
    run, missing = _run(log, field, arguments.again)
    settings = TimingSettings(rounds=arguments.rounds, budget_s=arguments.budget / max(1, len(field)))
    timer = ladder.LadderTimer(log, run, official, settings, gpu, folder)
    results = []
    for number, (problem, kernels) in enumerate(missing.items(), start=1):
        console.print(f"{number} of {len(missing)}: {problem.name}, {len(kernels)} kernels", soft_wrap=True)
        results.append(timer.measure(problem, kernels))
        for remark in results[-1].remarks:
            warn(remark)
    log.seal()
    for absent in dict.fromkeys(f"{name}: {reason}" for result in results for name, reason in result.absent.items()):
        warn(f"left out: {absent}")
    for table in ladder_tables.of_run(log.read()[0], name, run):
        console.print(table)
    aside(f"logged to {log.path}; `flashladder dashboard` makes tables and pictures of it")
    return EXIT_ERROR if any(not check.passed for result in results for check in result.checks.values()) else 0


def _the_ladder(versions: Iterable[Version]) -> str:
    """The ladder of all the rungs; ConfigError where they are of several, whose figures have nothing in common."""
    names = sorted({version.ladder for version in versions})
    if len(names) > 1:
        raise ConfigError(f"the rungs are of several ladders ({listing(names)}): name one")
    return names[0]


def _run(log: RunLog, field: Mapping[Problem, Kernels], again: bool) -> tuple[str, Mapping[Problem, Kernels]]:
    """The run to measure, the log's last or a new one, and what of the field it lacks."""
    from flashladder.common.records import ladder_runs, records
    from flashladder.common.records.slowdowns import completed
    from flashladder.common.studies.experiments import ladder

    frame, damaged = log.read()
    for damage in damaged:
        warn(f"{damage}; the line is left where it is, and its figures are measured again")
    runs = [] if again else ladder_runs.runs_of(completed(frame))
    missing = ladder.missing(field, runs[-1]) if runs else None
    if missing is None or len(missing) == len(field):
        return records.new_run(), field
    done = f"{len(field) - len(missing)} of {len(field)} shapes are there already"
    console.print(f"run {runs[-1].name} goes on: {done}; --again begins another", soft_wrap=True)
    return runs[-1].name, missing
