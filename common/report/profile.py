"""What a GPU counted in rungs, beside what was predicted, as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from flashladder.common import catalog
from flashladder.common.compiler.sources import own_line
from flashladder.common.console import facts, table
from flashladder.common.predict.profiling import ProfiledRung

GOOD, FAIR = 0.01, 0.05  # deviations up to them are green and yellow
HOTTEST = 12  # instructions shown
QUANTITIES = ("shared wavefronts", "global sectors", "executed", "busy %")


def details(rung: ProfiledRung) -> list[Table]:
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
    right = ("ncu", "predicted", "off by")
    made = table("Counted by ncu, and predicted", "figure", "of", *right, "by", right=right, wrap=("figure",))
    for figure in rung.agreements:
        spelled = "{:,.1f}" if figure.quantity.endswith("%") else "{:,.0f}"
        values = spelled.format(figure.measured), spelled.format(figure.predicted)
        made.add_row(figure.quantity, figure.opcode, *values, _deviation(figure.deviation), figure.by)
    return made


def _stalls(rung: ProfiledRung) -> Table:
    made = table("What warps were found doing", "reason", "samples", "share", right=("samples", "share"))
    for reason, samples in rung.profile.stalls().items():
        made.add_row(reason, f"{samples:,}", f"{samples / rung.profile.samples:.1%}")
    return made


def _hottest(rung: ProfiledRung) -> Table:
    """The instructions at which warps were found most often."""
    right, wrap = ("address", "share"), ("instruction", "source")
    made = table("Where warps were found", *right, "reason", *wrap, right=right, wrap=wrap)
    pairs = list(zip(rung.code.instructions, rung.profile.instructions, strict=False))
    for instruction, counted in sorted(pairs, key=lambda pair: -pair[1].samples)[:HOTTEST]:
        share = f"{counted.samples / rung.profile.samples:.1%}"
        reason = max(counted.stalls, key=lambda reason: counted.stalls[reason], default="")
        place = str(own_line(instruction.source)) if instruction.source else ""
        made.add_row(f"{instruction.address:x}", share, reason, instruction.text, place)
    return made


def summary(rungs: Sequence[ProfiledRung]) -> Table:
    """All rungs, a line each."""
    right = ("us", "tensor", "DRAM", "shared", "global", "executed", "pipes")
    title = "ncu's counters; then how far wavefronts, sectors, instructions and pipes are off at most"
    made = table(title, "rung", *right, right=right)
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
