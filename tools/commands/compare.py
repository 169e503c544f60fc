"""Two logged benchmarks side by side: what differs, and the ratios to the baseline that each has of its own.

flashladder compare 20261125-030243-629 20261122-163955-1610         two runs of results/
flashladder compare FILE.csv.gz /elsewhere/FILE.csv.gz                two files of one run each
flashladder compare bench.csv:20261125-030243-629 ...                 one of the runs of an older log

Kernels are left out whose code and configuration are the same, and whose ratios' intervals meet: --all shows them too.

Figures of two runs are never divided: they are of other moments, often of another card. For the ratio of two kernels,
measure both in one run: flashladder bench 16 24.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flashladder.common.console import Parser, console, warn
from flashladder.common.errors import ConfigError
from flashladder.common.paths import results_dir
from flashladder.common.report.tables import folding, numbers, table

if TYPE_CHECKING:
    from rich.table import Table

    from flashladder.common.records.comparison import ComparedKernel, LoggedRun


def parser() -> Parser:
    """The options."""
    made = Parser(__doc__)
    made.add_argument("runs", nargs=2, metavar="RUN", help="a run's name, a CSV file, or FILE:RUN")
    made.add_argument("--all", action="store_true", help="show kernels too in which the runs do not differ")
    return made


def main(arguments: argparse.Namespace) -> int:
    from flashladder.common.records import comparison

    _check_no_rungs(arguments.runs)
    first, second = runs = [comparison.load(what, results_dir()) for what in arguments.runs]
    if (first.file, first.name) == (second.file, second.name):
        raise ConfigError(f"{first.name} would be compared with itself: name another run")
    for damage in dict.fromkeys(damage for run in runs for damage in run.damaged):
        warn(f"{damage}; the line is left where it is, and out of the comparison")
    console.print(_circumstances(first, second))
    compared = comparison.compare(first, second)
    for run, other in ((first, second), (second, first)):
        if alone := comparison.kernels_of(run) - comparison.kernels_of(other):
            console.print(f"only in {run.name}: {', '.join(sorted(alone))}", soft_wrap=True)
    if not compared:
        raise ConfigError(f"{first.name} and {second.name} timed no kernel at the same shape")
    shown = [each for each in compared if arguments.all or each.differs]
    if shown:
        console.print(_ratios(shown, first, second))
    if alike := len(compared) - len(shown):
        console.print(f"{alike} of {len(compared)} kernels do not differ: --all shows them")
    console.print(
        "Ratios are each run's own, its baseline's time / the kernel's in the same rounds. Two runs are not divided by "
        "each other; `flashladder bench A B` times two kernels in one."
    )
    return 0


def _check_no_rungs(names: Sequence[str]) -> None:
    """ConfigError where both are rungs, which are compared within one run."""
    from flashladder.common import catalog

    try:
        rungs = [catalog.find(name).address for name in names]
    except ConfigError:
        return
    both = " ".join(rungs)
    raise ConfigError(f"{both}: rungs, not runs; `flashladder bench {both}` times both in one run")


def _circumstances(first: LoggedRun, second: LoggedRun) -> Table:
    """Under what the runs were measured, as far as that differs."""
    pairs = [(what, value, second.circumstances()[what]) for what, value in first.circumstances().items()]
    alike = ", ".join(f"{what} {one}" for what, one, other in pairs if one == other and one)
    rows = ((what, one or "-", other or "-") for what, one, other in pairs if one != other)
    return table("What differs", ["", *folding(first.name, second.name)], rows, f"alike: {alike or 'nothing'}")


def _ratios(compared: Sequence[ComparedKernel], first: LoggedRun, second: LoggedRun) -> Table:
    """The ratios of both, kernel by kernel."""
    rows = []
    for each in compared:
        one, other = each.differing_fields
        remarks = ["" if each.is_same_code else "other code", f"{one} | {other}" if one or other else ""]
        intervals = [f"{value:.3f} ({low:.3f}-{high:.3f})" for value, low, high in each.ratios]
        rows.append((each.title, each.shapes, *intervals, "; ".join(filter(None, remarks))))
    return table("Ratios", [*folding("kernel"), *numbers("shapes", first.name, second.name), *folding("")], rows)
