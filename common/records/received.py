"""Results that somebody sends, for a card that this project has not measured: what in such a file cannot be right.

A file of winners is configs/tuned/GPU.yaml, one of a ladder results/ladder_GPU.csv. Whether figures were really
measured nobody can tell from a file. What contradicts itself, the card's limits or this repository can be told.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from flashladder.common import catalog
from flashladder.common.catalog import winners
from flashladder.common.catalog.winners import Winner
from flashladder.common.errors import FlashLadderError, ResultsError, UnsupportedProblemError
from flashladder.common.measure import baselines
from flashladder.common.own import FIRST_OPERATION
from flashladder.common.problem.config import GpuDescription, gpu_names, load_gpu, parse_values
from flashladder.common.problem.problem import Problem, operation_named
from flashladder.common.records import records
from flashladder.common.records.ladder_runs import FIELD, MOST_THERMAL, runs_of
from flashladder.common.records.log import Log
from flashladder.common.records.slowdowns import completed

ROUNDED = 2e-3  # a part: figures of one measurement that are rounded apart, or are medians of other things
OF_MEDIANS = 0.05  # a ratio of medians, beside the median of ratios
ABOVE_PEAK = 1.1  # the peak is at a clock that a card may exceed
NOISY = 0.05  # a kernel beside itself
LEAST_ROUNDS = 8
_KEY = ["run", "kind", "version", "dtype", "seqlen_q", "causal"]
_WINNER = ("problems", "times_us", "baseline_us", "device", "driver", "torch", "toolkit", "commit", "time")
_INTERVAL = re.compile(r"(\S+) \[(\S+), (\S+)\]")


def faults(path: Path, known: Path | None = None) -> list[str]:
    """What is wrong with a file, in sentences that name the place; rows of `known` are not looked at.

    Raises ResultsError or ConfigError for a file that is none of the two.
    """
    if not path.is_file():
        raise ResultsError(f"there is no file {path}")
    if match := re.fullmatch(r"ladder_(.+)\.csv", path.name):
        return _of_ladder(path, match[1], known)
    if path.suffix == ".yaml":
        return _of_winners(path)
    raise ResultsError(
        f"{path} is neither ladder_GPU.csv, as `flashladder ladder` logs, nor GPU.yaml, as winners are kept"
    )


def _of_ladder(path: Path, gpu: str, known: Path | None) -> list[str]:
    frame, damaged = Log(path, records.LADDER).read()
    wrong = [str(damage) for damage in damaged]
    if known:
        before = Log(known, records.LADDER).read()[0][_KEY].itertuples(index=False, name=None)
        frame = frame[~frame[_KEY].apply(tuple, axis=1).isin(set(before))]
    if frame.empty:
        return [*wrong, f"{path} has no rows" + (" that are new" if known else "")]
    described = load_gpu(gpu) if gpu in gpu_names() else None
    frame = completed(frame)
    for number, row in zip(frame.index, frame.to_dict("records"), strict=True):
        where = f"{path.name}, row {number + 2} ({row['kind']} {row['version']})"
        wrong += [f"{where}: {fault}" for fault in _of_row(row, described)]
    for run in runs_of(frame):
        for name in ("gpu_id", "device", "driver", "torch"):
            if len(found := set(run.rows[name])) > 1:
                wrong.append(
                    f"{path.name}, run {run.name}: {name} is {' and '.join(sorted(map(str, found)))} in one run"
                )
        shapes = run.rows.groupby(["dtype", "seqlen_q", "causal"])
        for name in ("baseline_us", "rounds"):  # all took part in the same rounds, beside one baseline
            if (shapes[name].nunique() > 1).any():
                wrong.append(f"{path.name}, run {run.name}: {name} is not one for all that were timed together")
        if run.is_hot:
            wrong.append(f"{path.name}, run {run.name}: heat slowed it in more than {MOST_THERMAL:.0%} of samples")
    return wrong


def _of_row(row: Mapping[str, Any], gpu: GpuDescription | None) -> Iterator[str]:
    """What is wrong with a row of a ladder."""
    yield from _of_place(row, gpu)
    if row["kind"] != FIELD:
        yield from _of_config(str(row["version"]), str(row["config"]))
    elif row["version"] not in {*baselines.titles(), *(each.name for each in catalog.references())}:
        yield f"{row['version']} is neither a baseline nor a reference"
    if row["passed"] is not True:
        yield "its output was not right"
    for error, tolerance in (("max_error", "tolerance"), ("lse_error", "lse_tolerance")):
        if not row[error] <= row[tolerance]:
            yield f"{error}={row[error]:.3g} is above {tolerance}={row[tolerance]:.3g}"
    if pd.isna(row["time_us"]):
        return
    if words := records.bounds(row["window_left"], row["window_right"], row["softcap"]):
        yield f"its problem has a bound{words}: a ladder's problems have none"
        return
    try:
        problem = records.problem_of(row)
    except UnsupportedProblemError as error:
        yield str(error)
        return
    yield from _of_speed(problem, float(row["time_us"]), gpu)
    if not math.isclose(row["tflops"], records.tflops(problem, row["time_us"]), rel_tol=ROUNDED):
        yield f"tflops={row['tflops']:.1f}, but its time gives {records.tflops(problem, row['time_us']):.1f}"
    yield from _of_ratio(*(float(row[name]) for name in ("ratio", "ratio_low", "ratio_high")))
    if not math.isclose(row["ratio"], row["baseline_us"] / row["time_us"], rel_tol=OF_MEDIANS):
        yield f"ratio={row['ratio']:.3f}, but its times give {row['baseline_us'] / row['time_us']:.3f}"
    if not (row["control_low"] <= 1 + NOISY and row["control_high"] >= 1 - NOISY):
        yield f"the baseline differs from itself: {row['control_low']:.3f} to {row['control_high']:.3f}"
    yield from _of_rounds(row)


def _of_rounds(row: Mapping[str, Any]) -> Iterator[str]:
    """The times of rounds, from which figures follow."""
    if not row["round_us"] or pd.isna(row["round_us"]):
        yield "its rounds were not kept, so that nothing can be paired"
        return
    times = [float(word) for word in row["round_us"].split()]
    if len(times) != row["rounds"] or len(times) < LEAST_ROUNDS:
        yield f"it has the times of {len(times)} rounds; rounds={row['rounds']}, and {LEAST_ROUNDS} are the least"
    if len(set(times)) == 1:
        yield "all its rounds take the same time, which no clock measures"
    if not math.isclose(median(times), row["time_us"], rel_tol=ROUNDED):
        yield f"time_us={row['time_us']:.2f}, but its rounds have the median {median(times):.2f}"


def _of_winners(path: Path) -> list[str]:
    gpu = path.stem
    described = load_gpu(gpu) if gpu in gpu_names() else None
    home = path.absolute().parent
    if home.name != winners.FOLDER.name:
        raise ResultsError(f"{path} should lie in a folder {winners.FOLDER.name}, as the tuner writes it")
    found = winners.of_gpu(gpu, home.parent)
    wrong = [] if found else [f"{path} has no winners"]
    for winner in found:
        where = f"{path.name}, {winner.version}, {winner.kind}"
        wrong += [f"{where}: {fault}" for fault in _of_winner(winner, described)]
    return wrong


def _of_winner(winner: Winner, gpu: GpuDescription | None) -> Iterator[str]:
    evidence = winner.evidence
    if lacking := [name for name in _WINNER if not evidence.get(name)]:
        yield f"it lacks {', '.join(lacking)}, which the tuner writes"
        return
    yield from _of_place(evidence, gpu)
    try:
        winners.standing(winner)
    except FlashLadderError as error:
        yield str(error)
    try:
        problems = [problem_named(str(name)) for name in evidence["problems"]]
        ours, theirs = ([float(time) for time in evidence[name]] for name in ("times_us", "baseline_us"))
        ratio, low, high = _interval(evidence.get("ratio"))
    except (TypeError, ValueError, UnsupportedProblemError) as error:
        yield f"its evidence cannot be read: {error}"
        return
    if not len(problems) == len(ours) == len(theirs):
        yield f"it has {len(problems)} problems, {len(ours)} times and {len(theirs)} of the baseline"
        return
    for problem, time_us in zip(problems, ours, strict=True):
        if winner.kind not in winners.names_for(problem)[:2]:  # of its class of lengths, or of any
            yield f"it was found with {problem.name}, which is of another kind"
        yield from _of_speed(problem, time_us, gpu)
    yield from _of_ratio(ratio, low, high)
    given = math.exp(sum(math.log(b / t) for b, t in zip(theirs, ours, strict=True)) / len(ours))
    if not math.isclose(given, ratio, rel_tol=OF_MEDIANS):
        yield f"ratio={ratio:.3f}, but its times give {given:.3f}"
    if (to_default := evidence.get("to_default")) and _interval(to_default)[2] < 1:
        yield f"it is slower than the rung's default: {to_default}"


def _of_place(row: Mapping[str, Any], gpu: GpuDescription | None) -> Iterator[str]:
    """Where and with what it was measured."""
    if gpu is not None and str(row["device"]).lower() not in (name.lower() for name in gpu.names):
        yield f"device={row['device']}, but a {gpu.title} is called {' or '.join(gpu.names)}"
    commit = row["commit"]
    if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{7,40}", commit.removesuffix("+")):
        yield f"commit={commit!r} is none of this repository: measure in a clone of it"
    elif commit.endswith("+"):
        yield f"commit={commit}: files differed from the commit; measure without changes"
    elif not records.has_commit(commit):
        yield f"commit={commit} is not in this repository, so that nobody can see what was measured"
    try:
        if datetime.fromisoformat(str(row["time"])) > records.now():
            yield f"time={row['time']} is still to come"
    except (TypeError, ValueError):
        yield f"time={row['time']} is no time with its zone"


def _of_config(version: str, config: str) -> Iterator[str]:
    """The rung and its configuration, as they are now."""
    try:
        rung = catalog.find(version)
        rung.config(**parse_values(config))
    except FlashLadderError as error:
        yield str(error)


def _of_speed(problem: Problem, time_us: float, gpu: GpuDescription | None) -> Iterator[str]:
    if not 0 < time_us < math.inf:
        yield f"time_us={time_us} was never measured"
    elif gpu is not None and (rate := records.tflops(problem, time_us)) > ABOVE_PEAK * gpu.dense_bf16_tflops:
        yield f"{rate:.0f} TFLOP/s is beyond the {gpu.dense_bf16_tflops:.0f} of a {gpu.title}"


def _of_ratio(ratio: float, low: float, high: float) -> Iterator[str]:
    if not 0 < low <= ratio * (1 + ROUNDED) or not ratio * (1 - ROUNDED) <= high < math.inf:
        yield f"ratio={ratio:.3f} is not in its interval, {low:.3f} to {high:.3f}"


def _interval(text: object) -> tuple[float, float, float]:
    if not (match := _INTERVAL.fullmatch(str(text))):
        raise ValueError(f"{text!r} is no ratio with an interval, such as 1.0756 [1.0745, 1.0771]")
    value, low, high = map(float, match.groups())
    return value, low, high


_READ: dict[str, Callable[[str], Any]] = {"true": lambda _: True, "false": lambda _: False, "none": lambda _: None}


def problem_named(name: str) -> Problem:
    """The problem of a `Problem.name`; ValueError or UnsupportedProblemError for what is none."""
    known = {each.name: str(each.type) for each in fields(Problem)}
    values: dict[str, Any] = {}
    options = []
    for pair in name.split(","):
        field, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"{pair!r} is no field of a problem and its value")
        if field not in known:
            options.append(pair)
        elif text in _READ:
            values[field] = _READ[text](text)
        else:
            values[field] = text if known[field] == "str" else float(text) if "float" in known[field] else int(text)
    kind = operation_named(values.get("operation", FIRST_OPERATION))
    return Problem(**values, options=tuple(kind.parse(",".join(options)).items()))
