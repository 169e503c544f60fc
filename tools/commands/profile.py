"""What the GPU counts in a rung's kernel, beside what the emulator and the machine code predict.

python tools/profile.py 09                      ncu's counters of one launch, agreement, where warps wait
python tools/profile.py 09 --seqlen 4096 --heads 16 --batch 2
python tools/profile.py 08 09                   a summary of several, or --all; rows go to results/profile.csv
python tools/profile.py 09 --pages folder       keep ncu's pages; with pages there, no GPU is needed
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from flashladder.common import catalog
from flashladder.common.compiler.sources import own_line
from flashladder.common.console import EXIT_ERROR, Parser, console, warn
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.report.tables import facts, folding, numbers, table
from flashladder.tools.commands import arguments as options

if TYPE_CHECKING:
    from flashladder.common.predict.profiling import ProfiledRung

DEFAULTS = {"batch": 2, "num_heads": 16, "seqlen_q": 1024}  # fills a large GPU, and takes the emulator a few seconds
GOOD, FAIR = 0.01, 0.05  # deviations up to them are green and yellow
HOTTEST = 12  # instructions shown
QUANTITIES = ("shared wavefronts", "global sectors", "executed", "busy %")


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
        parser().print_help()
        return EXIT_ERROR
    versions = catalog.select(arguments.versions)
    rungs = _profiled(versions, arguments)
    for shown in _details(rungs[0]) if len(versions) == 1 else [_summary(rungs)]:
        console.print(shown)
    return 0


def _profiled(versions: Sequence[catalog.Version], arguments: argparse.Namespace) -> list[ProfiledRung]:
    """The rungs, profiled and logged one by one; of several, those that do not take the problem are left out."""
    from flashladder.common import compiler as build
    from flashladder.common.predict import profiling
    from flashladder.common.runtime import target

    place = target.resolve("auto", arguments.gpu)
    problem = options.problem(arguments, catalog.one_operation(v.operation for v in versions), **DEFAULTS)
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
            rungs.append(profiling.run(build.build_one(version, config, place.arch), problem, place, arguments.pages))
        if not arguments.no_log:
            path = profiling.log(rungs[-1])
            console.print(f"[dim]{version.name} logged to {path}")
    return rungs


def _details(rung: ProfiledRung) -> list[Table]:
    """One rung: what it took, how well it was predicted, where its warps wait."""
    return [_facts(rung), _agreements(rung), _stalls(rung), _hottest(rung)]


def _facts(rung: ProfiledRung) -> Table:
    artifact, problem = rung.code.artifact, rung.problem
    rate = problem.flops / rung.time_us / 1e6
    traffic, least = rung.dram_bytes / 1e6, rung.least_dram_bytes / 1e6
    return facts(
        f"{artifact.version}, profiled",
        {
            "configuration": artifact.config.name.replace(",", ", "),
            "problem": problem.name.replace(",", ", "),
            "time": f"{rung.time_us:,.1f} us, {rate:,.0f} TFLOP/s, profiled",
            "memory traffic": f"{traffic:,.1f} MB; each tensor once is {least:,.1f} MB",
            "instructions": f"{rung.profile.total('executed'):,} executed by warps",
        },
    )


def _agreements(rung: ProfiledRung) -> Table:
    rows = []
    for figure in rung.agreements:
        spelled = "{:,.1f}" if figure.quantity.endswith("%") else "{:,.0f}"
        values = spelled.format(figure.measured), spelled.format(figure.predicted)
        rows.append((figure.quantity, figure.opcode, *values, _deviation(figure.deviation), figure.by))
    columns = [*folding("figure"), "of", *numbers("ncu", "predicted", "off by"), "by"]
    return table("Counted by ncu, and predicted", columns, rows)


def _stalls(rung: ProfiledRung) -> Table:
    found = rung.profile.stalls().items()
    rows = ((reason, f"{samples:,}", f"{samples / rung.profile.samples:.1%}") for reason, samples in found)
    return table("What warps were found doing", ["reason", *numbers("samples", "share")], rows)


def _hottest(rung: ProfiledRung) -> Table:
    """The instructions at which warps were found most often."""
    columns = [*numbers("address", "share"), "reason", *folding("instruction", "source")]
    made = table("Where warps were found", columns)
    pairs = list(zip(rung.code.instructions, rung.profile.instructions, strict=False))
    for instruction, counted in sorted(pairs, key=lambda pair: -pair[1].samples)[:HOTTEST]:
        share = f"{counted.samples / rung.profile.samples:.1%}"
        reason = max(counted.stalls, key=lambda reason: counted.stalls[reason], default="")
        place = str(own_line(instruction.source)) if instruction.source else ""
        made.add_row(f"{instruction.address:x}", share, reason, instruction.text, place)
    return made


def _summary(rungs: Sequence[ProfiledRung]) -> Table:
    """All rungs, a line each."""
    columns = ["rung", *numbers("us", "tensor", "DRAM", "shared", "global", "executed", "pipes")]
    title = "ncu's counters; then how far wavefronts, sectors, instructions and pipes are off at most"
    made = table(title, columns)
    for rung in rungs:
        tensor = rung.agreement("busy %", "tensor") or rung.agreement("busy %", "wgmma")
        made.add_row(
            catalog.address_of(rung.code.artifact.version),
            f"{rung.time_us:,.1f}",
            f"{tensor.measured:.1f}%" if tensor else "",
            f"{rung.dram_bytes / 1e6:,.0f}MB",
            *(_deviation(rung.worst(quantity)) for quantity in QUANTITIES),
        )
    return made


def _deviation(value: float) -> Text:
    style = "green" if abs(value) <= GOOD else "yellow" if abs(value) <= FAIR else "red"
    return Text("none counted" if math.isinf(value) else f"{value:+.2%}", style)
