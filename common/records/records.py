"""The rows of the lab's logs: what was run, where, by what, and what came of it."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flashladder.common import host
from flashladder.common.catalog.naming import qualified
from flashladder.common.compiler.artifact import Artifact
from flashladder.common.compiler.toolchain import toolchain
from flashladder.common.errors import ToolchainError
from flashladder.common.measure import baselines
from flashladder.common.own import FIRST
from flashladder.common.paths import ROOT, results_dir
from flashladder.common.problem.check import Check
from flashladder.common.problem.config import spelled
from flashladder.common.problem.problem import Problem, operation_named
from flashladder.common.records.cells import base
from flashladder.common.records.log import Cell as Value
from flashladder.common.records.log import Log
from flashladder.common.records.run_files import SCRATCH, RunLog
from flashladder.common.records.schemas import (
    ACCURACY,
    BENCH,
    CHECK,
    EXPERIMENT,
    LADDER,
    PACKED,
    PROBLEM,
    RESOURCES,
    RUNS,
    SAMPLES,
)
from flashladder.common.records.slowdowns import SLOWDOWN_SHARES

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from flashladder.common.emulator import Report
    from flashladder.common.measure.cells import Cell
    from flashladder.common.measure.contest import Contest
    from flashladder.common.measure.references import Configured
    from flashladder.common.measure.timing import Measurement

Row = dict[str, Value]

_RUNS_OF: Counter[str] = Counter()  # runs of this process by second


# Each log is in a folder of results, by default this repository's; catalog.results_of says which is that of some rungs.


def runs(folder: Path | None = None) -> Log:
    """Every run of `flashladder run`."""
    return Log((folder or results_dir()) / "runs.csv", RUNS)


def bench(name: str = SCRATCH, folder: Path | None = None) -> RunLog:
    """Every comparison of `flashladder bench`, a row for each shape and kernel."""
    return RunLog(folder or results_dir(), name, BENCH)


def ladder(gpu: str, name: str = FIRST, folder: Path | None = None) -> RunLog:
    """A ladder as `flashladder ladder` measured it on a GPU, a row for each rung, kind of configuration and shape.

    Ladders beside the first one each have a folder of their own.
    """
    return RunLog(folder or results_dir(), qualified(name, f"ladder_{gpu}"), LADDER)


def experiment(name: str, folder: Path | None = None) -> RunLog:
    """The runs of one experiment of `flashladder experiment`."""
    return RunLog(folder or results_dir(), f"experiments/{name}", EXPERIMENT)


def accuracy(folder: Path | None = None) -> RunLog:
    """Errors and times of kernels over families of inputs, as `flashladder accuracy` finds them."""
    return RunLog(folder or results_dir(), "accuracy", ACCURACY)


def packed(gpu: str) -> RunLog:
    """Packed sequences as `flashladder packed` timed them on a GPU, a row for each mix of lengths and contender."""
    return RunLog(results_dir(), f"packed_{gpu}", PACKED)


def samples(run: str, folder: Path | None = None) -> Log:
    """The raw samples of one comparison."""
    return Log((folder or results_dir()) / "raw" / f"{run}.csv", SAMPLES)


def new_run() -> str:
    """A name for a run of a tool, by which its rows and its samples are found again; no two of a process share one."""
    name = f"{now():%Y%m%d-%H%M%S}-{os.getpid()}"
    _RUNS_OF[name] += 1
    return name if _RUNS_OF[name] == 1 else f"{name}-{_RUNS_OF[name]}"


def now() -> datetime:
    """The current time, in UTC."""
    return datetime.now(timezone.utc)


def of_place(on_gpu: bool, elsewhere: str = "emulator") -> Row:
    """When, where and with which versions something is run."""
    row: Row = {
        "time": now().isoformat(timespec="seconds"),
        "commit": commit(),
        "torch": str(torch.__version__),  # a plain one, which YAML takes
        "toolkit": _toolkit(),
        "device": elsewhere,
    }
    if on_gpu:
        from flashladder.common.measure.nvml import Monitor

        device = torch.cuda.current_device()
        monitor = Monitor(device)
        row |= {
            "device": torch.cuda.get_device_name(device),
            "driver": monitor.driver_version(),
            "gpu_id": monitor.gpu_id,
            "power_limit_w": monitor.power_limit_w(),
        }
    return row


def of_code(artifact: Artifact) -> Row:
    """Which kernel it is."""
    return {
        "version": artifact.version,
        "config": artifact.config.name,
        "arch": artifact.arch,
        "code": artifact.code,
    }


def of_artifact(artifact: Artifact) -> Row:
    """The same, and what the compiler said."""
    resources: Row = {name: getattr(artifact, name) for name in RESOURCES if name != "shared_bytes"}
    return {**of_code(artifact), **resources, "shared_bytes": artifact.launch.shared_bytes}


def spilled(row: Any) -> int:
    """Bytes that a thread spills and reloads, by a row; what the row does not say counts as none."""
    return int(np.nansum((row.spill_store_bytes, row.spill_load_bytes)))


def of_reference(kernel: Configured) -> Row:
    """The reference, its configuration, and what compiled it."""
    return {
        "version": kernel.version,
        "config": kernel.config.name,
        "code": kernel.key,
        "toolkit": kernel.toolkit,
    }


def of_kernel(kernel: Artifact | Configured) -> Row:
    """A rung's artifact, or a reference."""
    return of_artifact(kernel) if isinstance(kernel, Artifact) else of_reference(kernel)


def of_problem(problem: Problem) -> Row:
    """The shape and the rest of the problem."""
    row: Row = {name: getattr(problem, name) for name in PROBLEM if name != "options"}
    if problem.head_dim_v == problem.head_dim:
        row["head_dim_v"] = None
    return row | {"options": spelled(problem.set_options)}


def problem_of(row: Mapping[str, Any]) -> Problem:
    """The problem of a row; UnsupportedProblemError where it is none."""
    filled = {name: row[name] for name in PROBLEM if row.get(name) not in (None, "") and row[name] == row[name]}
    given = {name: base(PROBLEM[name])(value) for name, value in filled.items()}
    return problem_with(given.pop("options", ""), **given)


def problem_with(options: str, **fields: Any) -> Problem:
    """The problem of these fields, with options as its operation reads them; UnsupportedProblemError for none."""
    kind = operation_named(fields.get("operation", FIRST))
    return Problem(**fields, options=tuple(kind.parse(options).items()))


def bounds(window_left: float | None, window_right: float | None, softcap: float | None) -> str:
    """A problem's or a row's, in words that follow others; empty where it has none."""
    values = (None if value is None or np.isnan(value) else value for value in (window_left, window_right, softcap))
    left, right, softcap = values
    sides = ",".join("all" if keys is None else f"{keys:.0f}" for keys in (left, right)).removesuffix(",all")
    return (f", window {sides}" if sides != "all" else "") + (f", softcap {softcap:g}" if softcap else "")


def unbounded(rows: pd.DataFrame) -> pd.Series[bool]:
    """Which rows have neither a window nor a softcap: those with one are of other work."""
    return rows["window_left"].isna() & rows["window_right"].isna() & (rows["softcap"].isna() | rows["softcap"].eq(0))


def of_check(check: Check) -> Row:
    """Whether the output was right, and how close."""
    return {name: getattr(check, name) for name in CHECK}


def of_measurement(measurement: Measurement, name: str, problem: Problem, baseline_version: str) -> Row:
    """One contender's time, and its ratio to the baseline."""
    ratio, control = measurement.ratio(name), measurement.control
    time_us = measurement.time_us(name)
    return {
        "mode": measurement.mode,
        "rounds": measurement.rounds,
        "time_us": time_us,
        "tflops": tflops(problem, time_us),
        "sm_mhz": measurement.clock_mhz(name),
        "baseline": measurement.baseline,
        "baseline_version": baseline_version,
        "baseline_us": measurement.time_us(measurement.baseline),
        "ratio": ratio.value,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "control_low": control.low,
        "control_high": control.high,
        "verdict": measurement.verdict(name),
        "notes": "; ".join(measurement.disturbances()),
        "samples": len(measurement.samples),
        **{name: measurement.slowed_by(words) for name, words in SLOWDOWN_SHARES.items()},
    }


def of_contest(
    contest: Contest,
    run: str,
    kernels: Mapping[str, Artifact | Configured],
    on_gpu: bool = True,
    cell: Cell | None = None,
) -> dict[str, Row]:
    """A row for each contender, by its name; of those that were not timed, without figures."""
    place = {"run": run} | of_place(on_gpu, host.title()) | of_problem(contest.problem)
    known = baselines.of(contest.problem.operation)
    if cell:
        place |= {"group": cell.group, "case": cell.case, "mix": cell.mix}
    measurement = contest.measurement
    timed = measurement.checks if measurement else {}
    rows = {}
    for name, check in {**timed, **contest.checks}.items():
        kernel = of_kernel(kernels[name]) if name in kernels else {"version": name}
        if cell and name in known:
            kernel["release"] = known[name].version
        figures: Row = {}
        if measurement and name in timed:
            baseline = known.get(measurement.baseline)
            figures = of_measurement(measurement, name, contest.problem, baseline.version if baseline else "")
        rows[name] = place | kernel | of_check(check) | figures
    return rows


def of_packing(
    measurement: Measurement, run: str, mix: str, problem: Problem, kernels: Mapping[str, Artifact]
) -> list[Row]:
    """A row for each contender; what is not among the kernels is somebody else's."""
    alike = ("batch", "num_heads", "num_heads_k", "head_dim", "dtype", "causal", "seed")
    lengths: Row = {"tokens": problem.total_q, "shortest": min(problem.seqlens_q), "longest": max(problem.seqlens_q)}
    asked: Row = {"run": run, "mix": mix, **lengths, **{name: getattr(problem, name) for name in alike}}
    version = baselines.find(measurement.baseline, problem.operation).version
    return [
        of_place(True)
        | asked
        | {"contender": name}
        | (of_artifact(kernels[name]) if name in kernels else {"version": name})
        | of_check(check)
        | of_measurement(measurement, name, problem, version)
        for name, check in measurement.checks.items()
    ]


def of_report(report: Report) -> Row:
    """What the emulator counted."""
    names = ("mma_flops", "shared_wavefronts", "shared_wavefronts_ideal", "global_requests", "global_sectors")
    counters: Row = {name: getattr(report, name) for name in names}
    traffic: Row = {
        "global_bytes_read": report.bytes_read.get("global", 0),
        "global_bytes_written": report.bytes_written.get("global", 0),
    }
    return {
        "emulated_seconds": report.elapsed,
        "instructions": sum(report.instructions.values()),
        **counters,
        **traffic,
    }


def of_samples(measurement: Measurement, run: str, problem: Problem) -> list[Row]:
    """The raw samples, a row each."""
    return [
        {
            "run": run,
            "problem": problem.name,
            "contender": sample.contender,
            "mode": measurement.mode,
            "round": sample.round,
            "launches": sample.launches,
            "time_us": sample.time_us,
            "sm_mhz": sample.state.sm_mhz,
            "power_w": sample.state.power_w,
            "temperature_c": sample.state.temperature_c,
            "slowdowns": "|".join(sample.state.slowdowns),
        }
        for sample in measurement.samples
    ]


def tflops(problem: Problem, time_us: float) -> float:
    """The rate at which a problem was computed."""
    return problem.flops / time_us / 1e6


_MEASURED = (":!results", ":!configs/tuned")  # results, and winners of a search before


@cache
def commit() -> str | None:
    """The commit of the checkout, with a + where files differ from it, but for those that measuring writes.

    Outside a checkout, what $FLASHLADDER_COMMIT says, or None.
    """
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return f"{head}+" if _git("status", "--porcelain", "--untracked-files=no", "--", ".", *_MEASURED) else head
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("FLASHLADDER_COMMIT")


@cache
def has_commit(name: str) -> bool:
    """Whether the checkout has a commit of this name; true where that cannot be asked."""
    try:
        _git("rev-parse", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return True
    try:
        _git("cat-file", "-e", f"{name}^{{commit}}")
    except subprocess.CalledProcessError:
        return False
    return True


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _toolkit() -> str | None:
    try:
        return toolchain().release
    except ToolchainError:
        return None
