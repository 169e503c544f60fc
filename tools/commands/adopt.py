"""Tune for one program: which attention problems it asks for, what it gains by tuning for them, and the winners.

flashladder adopt -- python my_model.py --batch 4          run it, note its problems, tune, and export the winners
flashladder adopt --budget-seconds 900 --export mine -- python -m my_package
flashladder adopt --record -- python my_model.py           its problems only: adopted/problems.json
flashladder adopt --problems adopted/problems.json         tune for what was recorded, perhaps elsewhere
flashladder adopt --check                                  has anything become slower since?

`python` is the one that runs this command, unless it is a path. The program runs once, as it is but for torch.compile,
which is off. What is noted are its calls of torch's scaled_dot_product_attention and of this project's functions, in
its own process. Winners of the rung that attention() launches are found for each type, head_dim and mask, for short
keys and for long ones, with the heaviest problems of each. Then each problem is timed as torch computes it, with the
rung's default and with the winner. The export is a folder: FLASHLADDER_ADOPTED=adopted makes `attention` use its
winners and kernels. --check measures again, and ends with 2 where something is slower than it was.

Where there is no GPU, configurations are ranked by the cost model, and nothing is exported but the problems.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flashladder.common import catalog
from flashladder.common.catalog import FASTEST
from flashladder.common.console import EXIT_ERROR, Parser, console, warn
from flashladder.common.errors import ConfigError, DeviceError
from flashladder.common.problem.config import gpu_names
from flashladder.tools.commands.arguments import above_zero

if TYPE_CHECKING:
    from flashladder.common.runtime.target import Target
    from flashladder.tuner.adopt.demand import Alike, Demand
    from flashladder.tuner.job import Job

SECONDS = 600.0  # of tuning


def parser() -> Parser:
    """The options."""
    made = Parser(__doc__)
    made.add_argument("program", nargs="*", metavar="-- python ...", help="a file or, with -m, a module")
    made.add_argument("--problems", type=Path, metavar="FILE", help="what was recorded before, instead of a program")
    made.add_argument("--record", action="store_true", help="note the problems, and do no more")
    made.add_argument("--check", action="store_true", help="measure an export again, and say what is slower")
    made.add_argument("--export", type=Path, default=Path("adopted"), metavar="DIR", help="default: adopted")
    made.add_argument("--version", default=FASTEST, metavar="RUNG", help="to tune (default: what attention() launches)")
    described = ", ".join(gpu_names())
    made.add_argument("--gpu", metavar="NAME", help=f"without a GPU: what to rank for ({described}; default: h100)")
    made.add_argument(
        "--budget-seconds",
        type=above_zero,
        metavar="S",
        help=f"of tuning, all together (default: {SECONDS:.0f}; without a GPU, 60 a kind)",
    )
    return made


def main(arguments: argparse.Namespace) -> int:
    if sum((bool(arguments.program), bool(arguments.problems), arguments.check)) != 1:
        raise ConfigError("give one of these: a program after --, --problems FILE, or --check")
    from flashladder.common.runtime import target
    from flashladder.tuner.adopt import export, program, tuning
    from flashladder.tuner.adopt.demand import Demand, chooser, refusal

    if arguments.check:
        return _check(arguments.export)
    if arguments.version != FASTEST:
        catalog.find(arguments.version)  # refuses it now
    folder = export.folder_for(arguments.export)
    place = target.resolve("auto", arguments.gpu)
    demand = Demand.load(arguments.problems) if arguments.problems else program.record(arguments.program)
    demand.save(folder / export.PROBLEMS)
    choose = chooser(place.card, arguments.version, folder)
    wanted = demand.only(partial(refusal, choose))
    alike = wanted.alike(place.gpu)
    _show(wanted, alike, place)
    if not alike:
        warn("kernels take none of its calls: there is nothing to tune")
        return EXIT_ERROR
    if arguments.record:
        return 0
    seconds = arguments.budget_seconds or SECONDS
    jobs = tuning.jobs(choose, alike, place, folder, seconds)
    if not place.on_gpu:
        return _predict(jobs, alike, arguments.budget_seconds)
    code = tuning.tune(jobs, place, seconds)
    _export(arguments.version, wanted, alike, place, folder)
    return code


def _show(demand: Demand, alike: Sequence[Alike], place: Target) -> None:
    """What the program asks for."""
    from flashladder.tuner.adopt import tables

    console.print(tables.demand(demand, alike, place.gpu))
    for reason, calls in demand.refused.items():
        warn(f"{calls} calls stay as they are: {reason}")


def _predict(jobs: Sequence[Job], alike: Sequence[Alike], seconds: float | None) -> int:
    """The ranking of the cost model, and what the program would gain by it."""
    from flashladder.tuner import campaign
    from flashladder.tuner.adopt import tables, tuning

    campaign.rank(jobs, math.inf if seconds is None else seconds)
    if rows := tuning.predictions(jobs, alike):
        console.print(tables.predicted(rows))
    warn("there is no GPU here: nothing was measured, and no winner is exported. On a machine with one: --problems")
    return 0


def _export(version: str, demand: Demand, alike: Sequence[Alike], place: Target, folder: Path) -> None:
    """Measures what was gained, and exports it. DeviceError where nothing could be timed."""
    from flashladder.common.measure.timing import TimingSettings
    from flashladder.tuner.adopt import export, gains, tables
    from flashladder.tuner.adopt.demand import chooser

    choose = chooser(place.card, version, folder)
    measured, left_out = gains.measure(alike[: gains.TIMED], choose, place, folder, TimingSettings("hot"))
    for reason in left_out:
        warn(reason)
    if not measured:
        raise DeviceError("no problem of the program could be timed, so that there is nothing to adopt")
    console.print(tables.gained(measured, len(alike)))
    kernels = export.save(folder, version, place, demand, measured)
    console.print(f"{folder}: winners, {kernels} kernels, and the guard. FLASHLADDER_ADOPTED={folder} uses them")


def _check(folder: Path) -> int:
    """Measures an export again. The exit code is that of an error where something is slower or does not stand."""
    from flashladder.tuner.adopt import standing, tables

    found = standing.examine(folder)
    if not found.on_gpu:
        warn("there is no GPU here: times were not measured again")
    for reason in found.left_out:
        warn(reason)
    if found.gains:
        console.print(tables.gained(found.gains, found.timed))
    for fault in found.faults:
        console.print(fault, style="red", soft_wrap=True)
    if found.faults:
        return EXIT_ERROR
    console.print(f"{folder} stands" + (": nothing is slower than it was" if found.on_gpu else ", as far as it shows"))
    return 0
