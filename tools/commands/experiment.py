"""Sweeps that readers of the field expect, each logged, and drawn in results/experiments.

flashladder experiment --list
flashladder experiment                          all of them: on the GPU where there is one, else on the emulator
flashladder experiment blocks --rungs 08        every tile and number of warps of a rung
flashladder experiment loop_order               FlashAttention-1's and -2's traffic, counted by the emulator

The project's own results are tracked by git: what you run in a checkout goes to results/unpublished/experiments/, and
with --publish to results/experiments/. FLASHLADDER_RESULTS names another folder.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flashladder.common import catalog
from flashladder.common.console import Parser, aside, console, warn
from flashladder.common.paths import PUBLISHED, UNPUBLISHED
from flashladder.common.report.tables import folding, numbers, table
from flashladder.common.studies.experiments import sweeps
from flashladder.tools.commands import arguments as options

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from flashladder.common.records.run_files import RunLog
    from flashladder.common.studies.experiments.sweeps import Experiment

FIGURES = {  # columns of the log, what they are called on the console, and their unit there
    "time_us": ("us", 1),
    "tflops": ("TFLOP/s", 1),
    "ratio": ("ratio", 1),
    "max_error": ("error", 1),
    "memory_bytes": ("MiB taken", 2**20),
    "instructions": ("instructions", 1),
    "shared_wavefronts": ("wavefronts", 1),
    "global_bytes_read": ("MiB read", 2**20),
    "global_bytes_written": ("written", 2**20),
    "registers": ("registers", 1),
}


def parser() -> Parser:
    """The options."""
    made = Parser(__doc__)
    made.add_argument(
        "experiments", nargs="*", metavar="EXPERIMENT", help=f"of {', '.join(sweeps.EXPERIMENTS)}; default: all"
    )
    made.add_argument("--list", action="store_true", help="say what each is")
    made.add_argument("--rungs", help="08,16 for example, instead of the experiment's own choice")
    made.add_argument(
        "--seqlens", help="512..4096 doubles; or a list, 512,4096; instead of the experiment's own choice"
    )
    made.add_argument("--publish", action="store_true", help="add to the project's own results")
    options.add_rounds(made)
    options.add_device(made)
    return made


def main(arguments: argparse.Namespace) -> int:
    if arguments.list:
        console.print(_overview())
        return 0
    for experiment in [sweeps.find(name) for name in arguments.experiments] or sweeps.EXPERIMENTS.values():
        _run(experiment, arguments)
    return 0


def _overview() -> Table:
    rows = ((experiment.name, experiment.text) for experiment in sweeps.EXPERIMENTS.values())
    return table("Experiments", ["name", *folding("what its picture shows")], rows)


def _run(experiment: Experiment, arguments: argparse.Namespace) -> None:
    """Runs, logs and draws one experiment; each problem is logged as soon as it is done."""
    rungs = [catalog.find(name) for name in (arguments.rungs.split(",") if arguments.rungs else experiment.rungs)]

    from flashladder.common.measure.timing import TimingSettings
    from flashladder.common.records import records
    from flashladder.common.runtime import target
    from flashladder.common.studies.experiments import run

    place = target.resolve(arguments.device if experiment.lengths else "emulator", arguments.gpu)
    lengths = experiment.lengths if place.on_gpu else experiment.emulated_lengths
    if arguments.seqlens:
        lengths = tuple(options.lengths(arguments.seqlens))
    log = records.experiment(experiment.name, _folder(rungs, arguments.publish))
    for rows in run.rows(experiment, rungs, place, lengths, TimingSettings(rounds=arguments.rounds)):
        log.append(rows)
    log.seal()
    _show(experiment, log)


def _folder(rungs: Sequence[catalog.Version], publish: bool) -> Path:
    """Of results: git's own files stay as they are unless they are to be added to."""
    folder = catalog.results_of(rungs)
    return UNPUBLISHED if folder == PUBLISHED and not publish else folder


def _show(experiment: Experiment, log: RunLog) -> None:
    """A table of the latest run in the log; a picture of the latest on a GPU, where there is any."""
    from flashladder.common.report.charts import experiments as figures
    from flashladder.common.report.charts.theme import Chart

    log.report()
    frame, _ = log.read()
    if frame.empty:
        warn(f"{experiment.title}: nothing was run")
        return
    ran, drawn = frame[frame["run"] == frame["run"].iloc[-1]], figures.latest(frame)
    console.print(_table(f"{experiment.title}, {figures.source(ran)}", ran))
    chart = Chart(log.folder / f"{log.name}.svg", experiment.title, partial(figures.DRAW[experiment.name], drawn))
    chart.write()
    aside(f"logged to {log.path}; {chart.path.name} shows what was {figures.source(drawn)}")


def _table(title: str, rows: pd.DataFrame) -> Table:
    """The rows' figures, those that there are."""
    present = {column: words for column, (words, _) in FIGURES.items() if rows[column].notna().any()}
    cells = (
        (row["label"], row["dtype"], row["seqlen_q"], *(_cell(row[name], name) for name in present))
        for _, row in rows.iterrows()
    )
    return table(title, [*folding("kernel"), "dtype", *numbers("S", *present.values())], cells)


def _cell(value: float, column: str) -> str:
    if value != value:
        return ""
    scaled = value / FIGURES[column][1]
    return f"{scaled:,.0f}" if scaled >= 1000 else f"{scaled:.3g}"
