"""What the GPU counts in a rung's kernel, beside what the emulator and the machine code predict.

flashladder profile 09                      ncu's counters of one launch, agreement, where warps wait
flashladder profile 09 --seqlen 4096 --heads 16 --batch 2
flashladder profile 08 09                   a summary of several, or --all; rows go to results/profile.csv
flashladder profile 09 --pages folder       keep ncu's pages; with pages there, no GPU is needed
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flashladder.common import catalog
from flashladder.common.console import Parser, UsageError, aside, console, warn
from flashladder.common.errors import UnsupportedProblemError
from flashladder.tools.commands import arguments as options

if TYPE_CHECKING:
    from flashladder.common.predict.profiling import ProfiledRung


def parser() -> Parser:
    made = Parser(__doc__)
    made.add_argument("versions", nargs="*", metavar="RUNG", help="02, or swizzling")
    made.add_argument("--all", action="store_true", help="every rung that takes the problem")
    options.add_config(made)
    options.add_problem(made)
    made.add_argument("--gpu", metavar="NAME", help="without a GPU: the one that the pages are of (default: h100)")
    made.add_argument("--pages", type=Path, metavar="FOLDER", help="where ncu's pages are kept, and found again")
    made.add_argument("--no-log", action="store_true", help="write no rows to results/profile.csv")
    return made


def main(arguments: argparse.Namespace) -> int:
    if bool(arguments.versions) == arguments.all:
        raise UsageError
    from flashladder.common.report import profile as report

    versions = catalog.select(arguments.versions)
    rungs = _profiled(versions, arguments)
    for shown in report.details(rungs[0]) if len(versions) == 1 else [report.summary(rungs)]:
        console.print(shown)
    return 0


def _profiled(versions: Sequence[catalog.Version], arguments: argparse.Namespace) -> list[ProfiledRung]:
    """The rungs, profiled and logged one by one; of several, those that do not take the problem are left out."""
    from flashladder.common.compiler import build_one
    from flashladder.common.predict import profiling
    from flashladder.common.runtime import target

    place = target.resolve("auto", arguments.gpu)
    problem = options.problem(arguments, catalog.one_operation(v.operation for v in versions), "sampled")
    rungs = []
    for version in versions:
        try:
            config = version.config_for(problem, place.gpu, **options.config_values(arguments.config))
            version.check(problem, config)
        except UnsupportedProblemError as error:
            if len(versions) == 1:
                raise
            warn(str(error))
            continue
        with console.status(f"{version.name}: ncu and the emulator"):
            rungs.append(profiling.run(build_one(version, config, place.arch), problem, place, arguments.pages))
        if not arguments.no_log:
            path = profiling.log(rungs[-1])
            aside(f"{version.name} logged to {path}")
    return rungs
