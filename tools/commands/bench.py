"""Time rungs of the ladder and references against official kernels, side by side, over shapes.

flashladder bench 07 16
flashladder bench 16 16@block_m=128,num_warps=8 --baselines fa2,cudnn --seqlens 512..16384 --causal both
flashladder bench 16 --seqlens 4096 --rounds 8 --brief      a quick look
flashladder bench 24 47 --causal yes --window 4096 --softcap 30 --baselines flash-attn,fa3
flashladder bench mla/05 --mode graph --seqlens 4096 --tokens 524288     launches in a CUDA graph
flashladder bench c py_fa2 --device cpu --seqlens 1024 --tokens 1024 --heads 2
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from flashladder.common import catalog
from flashladder.common.console import EXIT_ERROR, Parser, UsageError, aside, console, warn
from flashladder.common.report import display, listing
from flashladder.tools.commands import arguments as options

if TYPE_CHECKING:
    from flashladder.common.measure.contest import Contest


def parser() -> Parser:
    """The options."""
    made = Parser(__doc__)
    made.add_argument("kernels", nargs="*", metavar="KERNEL", help="a rung or reference, @ a configuration")
    made.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="the cpu is for references")
    made.add_argument(
        "--baselines", help="first the one that ratios refer to (default: the official one; on a cpu: all)"
    )
    made.add_argument("--list-baselines", action="store_true", help="show the official kernels, and how to get them")
    options.add_shapes(made, seqlens="512..16384")
    options.add_no_lse(made)
    options.add_bounds(made)
    options.add_config(made)
    options.add_timing(made)
    made.add_argument("--brief", action="store_true", help="only the last table, one line a kernel")
    made.add_argument("--out", type=Path, metavar="FILE", help="write what is printed to a file too")
    made.add_argument("--log", default="bench", metavar="NAME", help="which log of results/ (default: bench)")
    made.add_argument("--no-log", action="store_true", help="write nothing to results/")
    return made


def main(arguments: argparse.Namespace) -> int:
    if arguments.list_baselines:
        console.print(listing.baselines())
        return 0
    if not arguments.kernels:
        raise UsageError

    from flashladder.common.measure import baselines, contest
    from flashladder.common.measure.entrants import assemble_all, parse
    from flashladder.common.measure.timing import TimingSettings
    from flashladder.common.records import records

    entrants = [parse(text, options.config_values(arguments.config), arguments.device) for text in arguments.kernels]
    on_gpu, operation = arguments.device == "gpu", catalog.one_operation(entrant.operation for entrant in entrants)
    usual = baselines.official(operation).name if on_gpu else ",".join(baselines.of(operation, on_gpu))
    names = [name for name in (arguments.baselines or usual).split(",") if name]
    official = [baselines.find(name, operation, on_gpu) for name in names]
    settings = TimingSettings(arguments.mode, arguments.rounds, arguments.seed)
    folder = catalog.results_of(entrant.kernel for entrant in entrants)
    run, log = records.new_run(), records.bench(arguments.log, folder)
    contests: list[Contest] = []
    lineup, left_out = assemble_all(entrants, options.shapes(arguments, operation), arguments.device)
    for reason in dict.fromkeys(left_out):
        warn(reason)
    for problem, kernels in lineup.items():
        result = contest.hold(problem, kernels, official, settings, "cuda" if on_gpu else "cpu")
        contests.append(result)
        for remark in result.remarks:
            warn(remark)
        if result.measurement and not arguments.brief:
            console.print(f"\n{problem.name}", style="bold")
            console.print(display.times(result.measurement, problem))
        if not arguments.no_log:
            log.append([*records.of_contest(result, run, kernels, on_gpu).values()])
            if result.measurement:
                records.samples(run, folder).append(records.of_samples(result.measurement, run, problem))
    for absent in dict.fromkeys(f"{name}: {reason}" for c in contests for name, reason in c.absent.items()):
        warn(f"no baseline {absent}")
    for table in display.overview(contests):
        console.print(table)
    if not arguments.no_log:
        log.seal()
        aside(f"logged to {log.path}, samples to {records.samples(run, folder).path}")
    if arguments.out:
        arguments.out.write_text(console.export_text())
    return EXIT_ERROR if any(not check.passed for result in contests for check in result.checks.values()) else 0
