"""How exact kernels are over families of inputs, beside official ones: errors of O and LSE against fp64, and bars.

And what hard inputs cost: a GPU gives the time of each family, the emulator the share of tiles computed twice.

flashladder accuracy                                the rungs of today, FlashAttention-2 and -3, cuDNN: on a GPU
flashladder accuracy 24 --families plateau_4,jump_rows --seqlens 131072
flashladder accuracy 16 18 --device emulator        without a GPU: short lengths, beside a plain FlashAttention-2
flashladder accuracy mla/05 mla/06                  of another ladder that computes O: errors alone
flashladder accuracy backward                       of dQ, dK and dV: what calls launch, beside FlashAttention-2
flashladder accuracy --list                         the families, and what each is for
flashladder accuracy --page                         only writes the page and its pictures, from the log

Rows go to results/runs/. The exit code is 1 where a rung misses a bar; results/accuracy.md says what bars are.
The page shows the first ladder.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flashladder.common import catalog
from flashladder.common.catalog import Version
from flashladder.common.console import Parser, aside, console, warn
from flashladder.common.errors import ConfigError
from flashladder.common.own import FIRST
from flashladder.common.report.tables import folding, table
from flashladder.tools.commands import arguments as options

if TYPE_CHECKING:
    import pandas as pd

    from flashladder.common.measure.entrants import Entrant, Launched
    from flashladder.common.records.run_files import RunLog
    from flashladder.common.report.answer import Findings
    from flashladder.common.runtime.target import Target
    from flashladder.common.studies.accuracy.study import Study

EXIT_MISSED = 1
PLAIN, LOWEST = "00", "16"  # the rungs that are studied: the textbook's, and from this one on
LENGTHS = {True: "128,1024,4096,16384,131072", False: "512"}  # on a GPU or not
LONGEST = 16384  # keys of gradients: all that is exact of them is fp64
ROWS = {True: 256, False: 128}
HEADS = {True: 2, False: 1}
BASELINES = {FIRST: "fa2,cudnn,fa3", "backward": "fa2"}  # by operation


def parser() -> Parser:
    """The options."""
    made = Parser(__doc__)
    made.add_argument("rungs", nargs="*", metavar="RUNG", help=f"default: {PLAIN}, and all from {LOWEST} on")
    made.add_argument("--list", action="store_true", help="say what each family is for")
    made.add_argument("--families", help="plateau_4,one_hot for example (default: all)")
    made.add_argument("--dtypes", default="bf16,fp16", help="default: bf16,fp16")
    made.add_argument(
        "--seqlens", help=f"of keys: 512..4096 doubles; or a list (default: {LENGTHS[True]}; {LENGTHS[False]})"
    )
    made.add_argument("--rows", type=int, help=f"of queries (default: {ROWS[True]}; {ROWS[False]} on the emulator)")
    made.add_argument("--heads", type=int, help=f"default: {HEADS[True]}; {HEADS[False]} on the emulator")
    made.add_argument("--baselines", help=f"official ones, on a GPU (default: {BASELINES[FIRST]}; of gradients fa2)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument(
        "--no-time", action="store_true", help="errors alone: no times on a GPU, no tiles counted on the emulator"
    )
    made.add_argument("--no-log", action="store_true", help="write nothing to results/")
    made.add_argument("--page", action="store_true", help="run nothing; write the page from the log")
    options.add_device(made)
    options.add_json(made)
    return made


def main(arguments: argparse.Namespace) -> int:
    from flashladder.common.problem.families import FAMILIES
    from flashladder.common.records import records
    from flashladder.common.studies.accuracy import logged

    if arguments.list:
        rows = ((family.name, family.purpose) for family in FAMILIES.values())
        console.print(table("Families of inputs", ["name", *folding("what it is")], rows))
        return 0
    if arguments.page:
        _write_page(records.accuracy(catalog.results_of(catalog.select(arguments.rungs))))
        return 0
    study = _study(arguments)
    log = records.accuracy(catalog.results_of(entrant.kernel for entrant in study.entrants))
    timed = study.operation == FIRST and not arguments.no_time
    found = logged.run(study, None if arguments.no_log else log, timed)
    if not arguments.no_log:
        aside(f"logged to {log.path}")
        if found["device"].iloc[-1] != "emulator":
            _write_page(log)
    return _show(found, arguments.json)


def _study(arguments: argparse.Namespace) -> Study:
    from flashladder.common.measure import baselines
    from flashladder.common.problem.problem import Problem, operation_named
    from flashladder.common.runtime import target
    from flashladder.common.studies.accuracy.deviation import GRADIENTS, OF_O
    from flashladder.common.studies.accuracy.study import Study

    place = target.resolve(arguments.device, arguments.gpu)
    entrants = _entrants(arguments.rungs, place)
    operation = catalog.one_operation(entrant.operation for entrant in entrants)
    kind = operation_named(operation)
    outputs = Problem(**kind.small, operation=operation).outputs
    if outputs not in (OF_O, GRADIENTS):
        raise ConfigError(f"errors are those of O and of gradients; the operation {operation} has other outputs")
    names = (arguments.baselines or BASELINES.get(operation, "")).split(",") if place.on_gpu else ()
    lengths = options.lengths(arguments.seqlens or LENGTHS[place.on_gpu])
    if not arguments.seqlens and outputs == GRADIENTS:
        lengths = [keys for keys in lengths if keys <= LONGEST]
    return Study(
        entrants=entrants,
        place=place,
        baselines=[baselines.find(name, operation) for name in filter(None, names)],
        operation=operation,
        families=options.chosen("family", arguments.families, kind.families),
        dtypes=options.chosen("dtype", arguments.dtypes, ("bf16", "fp16")),
        lengths=lengths,
        rows=arguments.rows or ROWS[place.on_gpu],
        heads=arguments.heads or HEADS[place.on_gpu],
        seed=arguments.seed,
    )


def _entrants(names: Sequence[str], place: Target) -> list[Entrant | Launched]:
    """Those named, where an operation is what its calls launch; without names, those of the default."""
    from flashladder.common.measure.entrants import Entrant, Launched

    tuned_for = place.gpu.name if place.on_gpu and place.gpu else None
    launched = [name for name in names if name != FIRST and catalog.ladder_of(name).launches]
    others = [name for name in names if name not in launched]
    rungs = catalog.select(others) if others else [] if launched else _usual(place.arch)
    return [*map(Launched, launched), *(Entrant(rung.address, rung, {}, tuned_for) for rung in rungs)]


def _usual(arch: str) -> list[Version]:
    """The rungs of the default that the arch can run."""
    chosen = []
    for version in catalog.versions():
        if version.number == PLAIN or version.number >= LOWEST:
            try:
                version.check_arch(arch)
                chosen.append(version)
            except ConfigError as error:
                warn(f"left out: {error}")
    return chosen


def _show(found: pd.DataFrame, findings: Findings | None) -> int:
    """The worst family of each kernel, and the bars that rungs miss."""
    from flashladder.common.report import accuracy

    rows = accuracy.latest(found, on_gpu=found["device"].iloc[-1] != "emulator")
    console.print(accuracy.gradients(rows) if rows["gradient"].any() else accuracy.worst(rows))
    missed = accuracy.missed(rows)
    if findings:
        from flashladder.common.report import answer

        faults = [answer.Fault(kind="accuracy", message=f"beyond a bar: {words}") for words in missed]
        findings.add(answer.of_accuracy(rows), faults)
    for words in missed:
        console.print(f"beyond a bar: {words}", soft_wrap=True)
    return EXIT_MISSED if missed else 0


def _write_page(log: RunLog) -> None:
    from flashladder.common.report.pages.accuracy import parts

    frame, damaged = log.read()
    for damage in damaged:
        warn(f"{damage}; the line is left where it is")
    for part in parts(log.folder / f"{log.name}.md", frame):
        if part.write():
            aside(f"{part.path} brought up to date")
