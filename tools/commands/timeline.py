"""Who does what when in a rung of Hopper: warpgroups, tensor cores and TMA, by time stamps that it takes on the GPU.

flashladder timeline 35                         a CSV of events and a picture, in results/timelines
flashladder timeline 34 35 --head-dim 64 --causal --seqlen 2048
flashladder timeline --draw FILE.csv.gz         the picture again, of events that were recorded: no GPU needed

The rung is built a second time: its PTX with a stamp where a warpgroup waits, starts products or starts a copy. How
much slower that makes it is measured, and stands in the picture.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from flashladder.common import catalog
from flashladder.common.console import Parser, UsageError, aside, console, progress, warn
from flashladder.common.errors import DeviceError
from flashladder.common.report.tables import numbers, table
from flashladder.tools.commands import arguments as options

if TYPE_CHECKING:
    from flashladder.common.problem.problem import Problem
    from flashladder.common.studies.timeline.events import Timeline


def parser() -> Parser:
    """The options."""
    made = Parser(__doc__)
    made.add_argument("versions", nargs="*", metavar="RUNG", help="35, or own_rows; from 25 on")
    made.add_argument("--draw", nargs="+", type=Path, default=[], metavar="CSV", help="draw these again")
    options.add_config(made)
    options.add_problem(made)
    return made


def main(arguments: argparse.Namespace) -> int:
    from flashladder.common.studies.timeline import events

    if bool(arguments.versions) == bool(arguments.draw):
        raise UsageError
    for path in arguments.draw:
        _show(events.read(path), path)
    if arguments.versions:
        _record(arguments)
    return 0


def _record(arguments: argparse.Namespace) -> None:
    from flashladder.common.compiler import BuildRequest, build
    from flashladder.common.runtime import gpu, target
    from flashladder.common.studies.timeline import events
    from flashladder.common.studies.timeline.record import record

    try:
        gpu.require_gpu()
    except DeviceError as error:
        raise DeviceError(f"{error}. Time stamps need a GPU: the emulator counts instructions, not cycles") from None
    place, versions = target.resolve("gpu", None), catalog.select(arguments.versions)
    problem = options.problem(arguments, catalog.one_operation(v.operation for v in versions))
    requests = []
    for version in versions:
        config = version.config_for(problem, place.gpu, **options.config_values(arguments.config))
        version.check(problem, config)
        requests.append(BuildRequest(version, config, place.arch))
    with progress("compiled") as update:
        build(requests, update)
    for version, request in zip(versions, requests, strict=True):
        with console.status(f"{version.name}: built with time stamps, and timed"):
            found = record(request, problem)
        path = catalog.results_of([version]) / "timelines" / f"{_name(version, problem)}.csv.gz"
        events.write(found, path)
        aside(f"events in {path}")
        _show(found, path)


def _name(version: catalog.Version, problem: Problem) -> str:
    mask = "causal" if problem.causal else "full"
    return f"{version.file_name}-d{problem.head_dim}-{mask}-{problem.seqlen_q}"


def _show(timeline: Timeline, path: Path) -> None:
    """Draws the picture beside the events, and tells what each phase took."""
    from flashladder.common.report.pictures import timelines
    from flashladder.common.studies.timeline import events, phases

    if flaw := timeline.facts.get("flaw"):
        warn(f"with time stamps, {flaw}")
    picture = events.picture_of(path)
    picture.write_text(timelines.draw(timeline))
    consumers = [lane for lane in timeline.lanes if lane.consumes]
    means = phases.means(consumers)
    cycles = sorted(means.items(), key=lambda each: -each[1])
    rows = [(phase, f"{mean:,.0f}") for phase, mean in [*cycles, ("all", sum(means.values()))]]
    title = f"{timeline.facts['version']}: mean cycles a block of a consumer"
    console.print(table(title, ["phase", *numbers("cycles")], rows))
    plain, with_stamps = (float(timeline.facts[f"us_{name}_stamps"]) for name in ("without", "with"))
    console.print(f"{plain:,.1f} us without stamps, {with_stamps:,.1f} us with them: {with_stamps / plain - 1:+.1%}")
    console.print(f"picture: {picture}", soft_wrap=True)
