"""What was run, as tables for the console."""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from flashladder.common import catalog
from flashladder.common.compiler.artifact import Artifact
from flashladder.common.compiler.sources import own_line
from flashladder.common.report import formats
from flashladder.common.report.tables import facts, folding, numbers, table

if TYPE_CHECKING:
    from flashladder.common.emulator import Report
    from flashladder.common.measure.contest import Contest
    from flashladder.common.measure.statistics import Estimate
    from flashladder.common.measure.timing import Measurement
    from flashladder.common.problem.check import Check
    from flashladder.common.problem.problem import Problem
    from flashladder.common.studies.single import Outcome

    Timed = Sequence[tuple[Problem, Measurement]]

_ACCESSES = ("cp", "async", "bulk", "ldmatrix", "stmatrix", "trans", "ld", "st", "wgmma")  # of an opcode's words
CONFLICTING = 1.01  # wavefronts to ideal ones, above which a line has bank conflicts
LENGTHS = 6  # that a table has room for beside a kernel's name, in a console of 80 columns
VERDICT_STYLES = {"faster": "green", "slower": "red", "tied": "yellow", "unclear": "dim"}


def outcome(of: catalog.Implementation, found: Outcome, every: bool) -> list[Table]:
    """What a run gave: what ran, and what was timed or counted; `every` figure, or what tells a good kernel."""
    tables = [facts(f"{of.name}: {of.title}", {"idea": of.idea, **_run(found), **found.facts})]
    if found.measurement:
        tables.append(times(found.measurement, found.problem, found.titles))
    if found.report:
        tables += filter(None, (counters(found.report, found.problem, every), traffic(found.report, every)))
    return tables


def _run(found: Outcome) -> dict[str, str | Text]:
    """What ran, where, and whether the output is right."""
    kernel = found.kernel
    what = {"compiled": _compiled(kernel)} if isinstance(kernel, Artifact) else {"toolkit": kernel.toolkit}
    return {
        "configuration": kernel.config.name.replace(",", ", "),
        **what,
        "problem": found.problem.name.replace(",", ", "),
        "device": found.device,
        "check": _verdict(found.check),
    }


def _compiled(artifact: Artifact) -> str:
    """What the compiler made of a rung."""
    compiled = "from the cache" if artifact.cached else f"in {artifact.compile_seconds:.1f} s"
    spills = f"{artifact.spill_store_bytes} bytes of spill stores, {artifact.spill_load_bytes} of loads"
    resources = [
        f"{artifact.registers} registers",
        spills if artifact.local_bytes else "no spills",
        f"{artifact.launch.shared_bytes / 1024:g} KiB of shared memory",
        f"{artifact.launch.num_threads} threads",
    ]
    return f"for {artifact.arch}, {compiled}: {', '.join(resources)}"


def _verdict(check: Check) -> Text:
    errors = f"error of {check.output} {check.max_error:.2g} (tolerance {check.tolerance:.2g})"
    if check.lse_tolerance:  # it was compared
        errors += f", of lse {check.lse_error:.2g} (tolerance {check.lse_tolerance:.2g})"
    return Text.assemble(("PASS", "bold green") if check.passed else ("FAIL", "bold red"), ": ", errors)


def counters(report: Report, problem: Problem, every: bool = True) -> Table:
    """What the emulator counted, in total: all of it, or what tells a good kernel."""
    from flashladder.common.emulator import TMA, WGMMA

    ratio = report.shared_wavefronts / max(report.shared_wavefronts_ideal, 1)
    ideal_sectors = sum(line.ideal for line in report.global_memory)
    of_problem = f" ({report.mma_flops / problem.flops:.2f} of the problem's)" if problem.flops else ""
    found = {
        "CTAs": f"{report.num_ctas:,} in {report.elapsed:.2f} s",
        "mma FLOPs": f"{report.mma_flops:,}{of_problem}",
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
    title = "Shared memory, line by line" if every else "Lines with bank conflicts"
    made = table(title, ["line", *folding("source"), "access", *numbers("wavefronts", "ideal", "ratio")])
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
    made = table(title, [*folding("kernel"), *numbers(*figures), "verdict"])
    for name in measurement.checks:
        time_us = measurement.time_us(name)
        cells = [titles.get(name, name), f"{time_us:.1f}", formats.rate(problem.rate(time_us), problem.asked.unit)]
        if clocks:
            cells.append(f"{clocks[name]:.0f}" if name in clocks else "")
        is_baseline = name == measurement.baseline
        made.add_row(*cells, *(["1"] if is_baseline else _ratio(measurement.ratio(name), measurement.verdict(name))))
    return made


def _ratio(estimate: Estimate, verdict: str) -> tuple[str, str, Text]:
    """A ratio's cells: value, interval, verdict."""
    interval = formats.interval(estimate.low, estimate.high)
    return formats.ratio(estimate.value), interval, Text(verdict, VERDICT_STYLES[verdict])


def overview(contests: Sequence[Contest]) -> list[Table]:
    """For each dtype, mask and family: every kernel's TFLOP/s and ratio at each length, and means over the lengths."""
    from flashladder.common.problem.families import NORMAL
    from flashladder.common.records.records import bounds

    groups: dict[str, list[tuple[Problem, Measurement]]] = {}
    for contest in contests:
        if contest.measurement:
            problem = contest.problem
            what = f"{problem.dtype}, {'causal' if problem.causal else 'full'}" + ("" if problem.lse else ", no LSE")
            what += bounds(problem.window_left, problem.window_right, problem.softcap)
            what += "" if problem.family == NORMAL else f", {problem.family}"
            groups.setdefault(what, []).append((problem, contest.measurement))
    tables = []
    for what, timed in groups.items():
        parts = (timed[start : start + LENGTHS] for start in range(0, len(timed), LENGTHS))
        tables += [*(_lengths(part, what) for part in parts), _means(timed, what)]
    return tables


def _lengths(timed: Timed, what: str) -> Table:
    columns = [*folding("kernel"), *numbers(*(max(problem.seqlen_q, problem.seqlen_k) for problem, _ in timed))]
    rows = ((name, *(_cell(measured, problem, name) for problem, measured in timed)) for name in _names(timed))
    return table(f"{what}: {_unit(timed)}, and ratio", columns, rows)


def _cell(measurement: Measurement, problem: Problem, name: str) -> Text:
    if name not in measurement.checks:
        return Text("-")
    rate = formats.rate(problem.rate(measurement.time_us(name)), problem.asked.unit)
    if name == measurement.baseline:
        return Text(rate)
    style = VERDICT_STYLES[measurement.verdict(name)]
    return Text.assemble(rate, "\n", (formats.ratio(measurement.ratio(name).value), style))


def _means(timed: Timed, what: str) -> Table:
    from flashladder.common.measure.statistics import geometric_mean, harmonic_mean, verdict
    from flashladder.common.measure.timing import CONTROL

    unit = _unit(timed)
    title = f"{what}: harmonic mean of {unit}, geometric mean of the ratios"
    made = table(title, [*folding("kernel"), *numbers(unit, "ratio", "95 % interval"), "verdict"])
    for name in _names(timed):
        there = [(problem, measurement) for problem, measurement in timed if name in measurement.checks]
        pairs, controls = ([(m.times(m.baseline), m.times(other)) for _, m in there] for other in (name, CONTROL))
        mean, control = geometric_mean(pairs), geometric_mean(controls)
        speed = harmonic_mean([problem.rate(measurement.time_us(name)) for problem, measurement in there])
        is_baseline = all(name == measurement.baseline for _, measurement in there)
        made.add_row(name, formats.rate(speed, unit), *([] if is_baseline else _ratio(mean, verdict(mean, control))))
    return made


def _unit(timed: Timed) -> str:
    """Of the speeds: kernels that are compared compute one operation."""
    return timed[0][0].asked.unit


def _names(timed: Timed) -> list[str]:
    """Every kernel that was timed, in order."""
    return list(dict.fromkeys(name for _, measurement in timed for name in measurement.checks))
