"""What was run, as tables for the console."""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from flashladder.common import catalog
from flashladder.common.catalog.instruction_sets import INSTRUCTION_SETS
from flashladder.common.compiler.sources import own_line
from flashladder.common.console import facts, table

if TYPE_CHECKING:
    from flashladder.common.compiler.artifact import Artifact
    from flashladder.common.emulator import Report
    from flashladder.common.measure.contest import Contest
    from flashladder.common.measure.references import Configured
    from flashladder.common.measure.statistics import Estimate
    from flashladder.common.measure.timing import Measurement
    from flashladder.common.problem.check import Check
    from flashladder.common.problem.problem import Problem

    Timed = Sequence[tuple[Problem, Measurement]]

_ACCESSES = ("cp", "async", "bulk", "ldmatrix", "stmatrix", "trans", "ld", "st", "wgmma")  # of an opcode's words
CONFLICTING = 1.01  # wavefronts to ideal ones, above which a line has bank conflicts
LENGTHS = 6  # that a table has room for beside a kernel's name, in a console of 80 columns
VERDICT_STYLES = {"faster": "green", "slower": "red", "tied": "yellow", "unclear": "dim"}


def ladder(name: str = catalog.FIRST) -> Table:
    """Every rung of a ladder, with its idea and what it takes."""
    title = f"The ladder {name}" if name else "The ladder"
    made = table(title, "rung", "idea", "needs", "takes", wrap=("idea", "takes"))
    for version in catalog.versions(ladder=name):
        needs = INSTRUCTION_SETS[version.instruction_set].needs
        draft = f" (a draft, from {version.parent})" if version.draft else ""
        idea = Text.assemble((version.title, "bold"), draft, "\n", version.idea)
        made.add_row(version.name, idea, needs, _takes(version.supports))
    return made


def _takes(supports: catalog.Supports) -> str:
    features = [name for name in ("causal", "gqa") if getattr(supports, name)]
    lengths = "any length" if supports.seqlen_q == supports.seqlen_k == "any" else "whole tiles"
    wide = {"d": supports.head_dim, "d of V": supports.head_dim_v}
    widths = [f"{name} {', '.join(map(str, sorted(columns)))}" for name, columns in wide.items() if columns]
    return "; ".join([", ".join(supports.dtype), *widths, lengths, *features])


def references() -> Table:
    """The implementations beside the ladder, and what they lack here."""
    from flashladder.common.measure.references import missing

    made = table("References", "name", "idea", "runs on", "takes", "here", wrap=("idea", "takes", "here"))
    for reference in catalog.references():
        idea = Text.assemble((reference.title, "bold"), "\n", reference.idea)
        here = Text(reason, "yellow") if (reason := missing(reference)) else "yes"
        made.add_row(reference.name, idea, ", ".join(reference.devices), _takes(reference.supports), here)
    return made


def baselines() -> Table:
    """Every official kernel: its version here, or why it is missing and the line that installs it."""
    from flashladder.common.measure import baselines as official

    made = table("Official kernels", "name", "kernel", "computes", "here", wrap=("here",))
    for baseline in (each for operation in official.measured() for each in official.of(operation).values()):
        here = Text(missing, "yellow") if (missing := baseline.missing()) else baseline.version
        made.add_row(baseline.name, baseline.title, baseline.operation, here)
    return made


def summary(
    version: catalog.Version, artifact: Artifact, problem: Problem, device: str, check: Check, more: Mapping[str, str]
) -> Table:
    """What ran, what the compiler made of it, whether the output is right, and what more there is to say."""
    compiled = "from the cache" if artifact.cached else f"in {artifact.compile_seconds:.1f} s"
    spills = f"{artifact.spill_store_bytes} bytes of spill stores, {artifact.spill_load_bytes} of loads"
    resources = [
        f"{artifact.registers} registers",
        spills if artifact.local_bytes else "no spills",
        f"{artifact.launch.shared_bytes / 1024:g} KiB of shared memory",
        f"{artifact.launch.num_threads} threads",
    ]
    return facts(
        f"{version.name}: {version.title}",
        {
            "idea": version.idea,
            "configuration": artifact.config.name.replace(",", ", "),
            "compiled": f"for {artifact.arch}, {compiled}: {', '.join(resources)}",
            "problem": problem.name.replace(",", ", "),
            "device": device,
            "check": _verdict(check),
            **more,
        },
    )


def reference_summary(
    kernel: Configured, problem: Problem, device: str, check: Check, more: Mapping[str, str]
) -> Table:
    """The same of a reference, with what it tells of its run."""
    return facts(
        f"{kernel.version}: {kernel.reference.title}",
        {
            "idea": kernel.reference.idea,
            "configuration": kernel.config.name.replace(",", ", "),
            "toolkit": kernel.toolkit,
            "problem": problem.name.replace(",", ", "),
            "device": device,
            "check": _verdict(check),
            **more,
        },
    )


def _verdict(check: Check) -> Text:
    errors = f"error of o {check.max_error:.2g} (tolerance {check.tolerance:.2g})"
    if check.lse_tolerance:  # it was compared
        errors += f", of lse {check.lse_error:.2g} (tolerance {check.lse_tolerance:.2g})"
    return Text.assemble(("PASS", "bold green") if check.passed else ("FAIL", "bold red"), ": ", errors)


def counters(report: Report, problem: Problem, every: bool = True) -> Table:
    """What the emulator counted, in total: all of it, or what tells a good kernel."""
    from flashladder.common.emulator import TMA, WGMMA

    ratio = report.shared_wavefronts / max(report.shared_wavefronts_ideal, 1)
    ideal_sectors = sum(line.ideal for line in report.global_memory)
    found = {
        "CTAs": f"{report.num_ctas:,} in {report.elapsed:.2f} s",
        "mma FLOPs": f"{report.mma_flops:,} ({report.mma_flops / problem.flops:.2f} of the problem's)",
        "shared-memory wavefronts": f"{report.shared_wavefronts:,}, ideal {report.shared_wavefronts_ideal:,} "
        f"({ratio:.2f}x)",
        "global sectors": f"{report.global_sectors:,}, ideal {ideal_sectors:,}, "
        f"{report.global_sectors / max(report.global_requests, 1):.1f} a request",
    }
    for mover in (WGMMA, TMA):
        if wavefronts := report.wavefronts_of(mover):
            found[f"of them {mover}'s"] = f"{wavefronts:,}"
    if every:
        read, written = (bytes_of.get("global", 0) for bytes_of in (report.bytes_read, report.bytes_written))
        found["global bytes"] = f"{read:,} read, {written:,} written"
        found["warp instructions"] = f"{sum(report.instructions.values()):,}"
    return facts("Counted by the emulator", found)


def traffic(report: Report, every: bool = True) -> Table | None:
    """Shared-memory wavefronts of each line of the kernel, actual and ideal: the line that calls what was inlined.

    Unless it is of every line, of those with bank conflicts; None where there are none.
    """
    figures = ("wavefronts", "ideal", "ratio")
    title = "Shared memory, line by line" if every else "Lines with bank conflicts"
    made = table(title, "line", "source", "access", *figures, right=figures, wrap=("source",))
    totals: dict[tuple[str, int, str], list[int]] = {}
    for line in report.shared:
        access = ".".join(word for word in line.opcode.split(".") if word in _ACCESSES)
        total = totals.setdefault((*own_line(line.source), access), [0, 0])
        total[:] = total[0] + line.units, total[1] + line.ideal
    for (file, number, access), (units, ideal) in totals.items():
        ratio = units / ideal if ideal else 1.0
        if ratio <= CONFLICTING and not every:
            continue
        source = Text(linecache.getline(file, number).strip(), no_wrap=True, overflow="ellipsis")
        style = "red" if ratio > CONFLICTING else "green"
        place = f"{file.rsplit('/', 1)[-1]}:{number}"
        made.add_row(place, source, access, f"{units:,}", f"{ideal:,}", Text(f"{ratio:.2f}x", style))
    return made if made.row_count else None


def times(measurement: Measurement, problem: Problem, titles: Mapping[str, str] = MappingProxyType({})) -> Table:
    """Each contender's time and rate, and its ratio to the baseline."""
    from flashladder.common.measure.statistics import noise_floor

    clocks = {name: clock for name in measurement.checks if (clock := measurement.clock_mhz(name))}
    figures = ("us", problem.asked.unit, *(("SM MHz",) if clocks else ()), "ratio", "95 % interval")
    title = f"Timed: {measurement.mode}, {measurement.rounds} rounds, noise {noise_floor(measurement.control):.1%}"
    made = table(title, "kernel", *figures, "verdict", right=figures, wrap=("kernel",))
    for name in measurement.checks:
        time_us = measurement.time_us(name)
        made.add_row(
            titles.get(name, name),
            f"{time_us:.1f}",
            rate(problem.rate(time_us), problem.asked.unit),
            *((f"{clocks[name]:.0f}" if name in clocks else "",) if clocks else ()),
            *(
                ("1", "", "")
                if name == measurement.baseline
                else ratio(measurement.ratio(name), measurement.verdict(name))
            ),
        )
    return made


def rate(value: float, unit: str = "TFLOP/s") -> str:
    """A speed in its unit; of what is slower than one, as CPUs are, two digits. Memory's speed has two decimals."""
    if value < 1:
        return f"{value:.2g}"
    return f"{value:.2f}" if unit == "TB/s" else f"{value:.1f}"


def ratio(estimate: Estimate, verdict: str) -> tuple[str, str, Text]:
    """A ratio's cells: value, interval, verdict."""
    interval = f"{estimate.low:.3f} to {estimate.high:.3f}"
    return f"{estimate.value:.3f}", interval, Text(verdict, VERDICT_STYLES[verdict])


def overview(contests: Sequence[Contest]) -> list[Table]:
    """For each dtype and mask: every kernel's TFLOP/s and ratio at each length, and their means over the lengths."""
    from flashladder.common.records.records import bounds

    groups: dict[str, list[tuple[Problem, Measurement]]] = {}
    for contest in contests:
        if contest.measurement:
            problem = contest.problem
            what = f"{problem.dtype}, {'causal' if problem.causal else 'full'}" + ("" if problem.lse else ", no LSE")
            what += bounds(problem.window_left, problem.window_right, problem.softcap)
            groups.setdefault(what, []).append((problem, contest.measurement))
    tables = []
    for what, timed in groups.items():
        parts = (timed[start : start + LENGTHS] for start in range(0, len(timed), LENGTHS))
        tables += [*(_lengths(part, what) for part in parts), _means(timed, what)]
    return tables


def _lengths(timed: Timed, what: str) -> Table:
    lengths = [str(problem.seqlen_q) for problem, _ in timed]
    made = table(f"{what}: {_unit(timed)}, and ratio", "kernel", *lengths, right=lengths, wrap=("kernel",))
    for name in _names(timed):
        made.add_row(name, *(_cell(measurement, problem, name) for problem, measurement in timed))
    return made


def _cell(measurement: Measurement, problem: Problem, name: str) -> Text:
    if name not in measurement.checks:
        return Text("-")
    speed = rate(problem.rate(measurement.time_us(name)), problem.asked.unit)
    if name == measurement.baseline:
        return Text(speed)
    style = VERDICT_STYLES[measurement.verdict(name)]
    return Text.assemble(speed, "\n", (f"{measurement.ratio(name).value:.3f}", style))


def _means(timed: Timed, what: str) -> Table:
    from flashladder.common.measure.statistics import geometric_mean, harmonic_mean, verdict
    from flashladder.common.measure.timing import CONTROL

    unit = _unit(timed)
    figures = (unit, "ratio", "95 % interval")
    title = f"{what}: harmonic mean of {unit}, geometric mean of the ratios"
    made = table(title, "kernel", *figures, "verdict", right=figures, wrap=("kernel",))
    for name in _names(timed):
        there = [(problem, measurement) for problem, measurement in timed if name in measurement.checks]
        pairs, controls = ([(m.times(m.baseline), m.times(other)) for _, m in there] for other in (name, CONTROL))
        mean, control = geometric_mean(pairs), geometric_mean(controls)
        speed = harmonic_mean([problem.rate(measurement.time_us(name)) for problem, measurement in there])
        is_baseline = all(name == measurement.baseline for _, measurement in there)
        made.add_row(name, rate(speed, unit), *([] if is_baseline else ratio(mean, verdict(mean, control))))
    return made


def _unit(timed: Timed) -> str:
    """Of the speeds: kernels that are compared compute one operation."""
    return timed[0][0].asked.unit


def _names(timed: Timed) -> list[str]:
    """Every kernel that was timed, in order."""
    return list(dict.fromkeys(name for _, measurement in timed for name in measurement.checks))
