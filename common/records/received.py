"""Results that somebody sends, for a card that this project has not measured: what in such a file cannot be right.

A file of winners is configs/tuned/GPU.yaml, one of a ladder results/runs/ladder_GPU@RUN.csv.gz. Whether figures were
really measured nobody can tell from a file. What contradicts itself, the card's limits or this repository can be told.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import pandas as pd
import yaml

from flashladder.common import catalog, yaml_files
from flashladder.common.catalog import winners
from flashladder.common.catalog.winners import Winner
from flashladder.common.errors import FlashLadderError, ResultsError
from flashladder.common.escape import quoted
from flashladder.common.measure import baselines
from flashladder.common.problem.config import GpuDescription, gpu_names, load_gpu, parse_values
from flashladder.common.problem.problem import Problem
from flashladder.common.records import records
from flashladder.common.records.cells import Name, Pairs, PositiveFloat, Share, Size, Words, text
from flashladder.common.records.ladder_runs import FIELD, MOST_THERMAL, runs_of
from flashladder.common.records.log import Log, Schema
from flashladder.common.records.run_files import gpu_of
from flashladder.common.records.schemas import PLACE, PROBLEM, RESOURCES
from flashladder.common.records.slowdowns import completed

ROUNDED = 2e-3  # a part: figures of one measurement that are rounded apart, or are medians of other things
OF_MEDIANS = 0.05  # a ratio of medians, beside the median of ratios
ABOVE_PEAK = 1.1  # the peak is at a clock that a card may exceed
NOISY = 0.05  # a kernel beside itself
LEAST_ROUNDS = 8
_LADDER = "ladder_*"
_NOT_ALWAYS = {"notes", "chosen_by", "window_left", "window_right", "softcap", "operation", "head_dim_v", "options"}
_OF_RUNGS = {"config", "arch", "code", *RESOURCES}  # one of the field has none
_INTERVAL = r"(\d+\.?\d*) \[(\d+\.?\d*), (\d+\.?\d*)\]"
_Ratio = Annotated[str, text(_INTERVAL, "a ratio with an interval, such as 1.0756 [1.0745, 1.0771]")]
_PLACE = {name: PLACE[name] for name in ("device", "driver", "torch", "toolkit", "commit", "time")}
_FOUND = {"problems": list[Pairs], "times_us": list[PositiveFloat], "baseline_us": list[PositiveFloat], "ratio": _Ratio}
_NEWER = {"to_default": _Ratio, "baseline": Words, "timing": Name}
_EVIDENCE = Schema({**_PLACE, **_FOUND, **_NEWER}, {**_PLACE, **_FOUND})
_SIZES = dict.fromkeys(("total_q", "total_k"), Size)
_PROBLEM = Schema({**PROBLEM, **_SIZES, "alibi": bool, "sinks": bool, "dropout_p": Share})


def faults(path: Path) -> list[str]:
    """What is wrong with a file, in sentences that name the place.

    Raises ResultsError or ConfigError for a file that is none of the two.
    """
    if not path.is_file():
        raise ResultsError(f"there is no file {path}")
    if _is_ladder(path):
        return _of_ladder(path, gpu_of_file(path))
    if path.suffix == ".yaml":
        return _of_winners(path)
    raise ResultsError(
        f"{path} is neither ladder_GPU@RUN.csv.gz, as `flashladder ladder` logs, nor GPU.yaml, as winners are kept"
    )


def gpu_of_file(path: Path) -> str:
    """Of which GPU a file is, by its name. ResultsError for one of a ladder that has none."""
    return gpu_of(path, _LADDER) if _is_ladder(path) else path.stem


def _is_ladder(path: Path) -> bool:
    return path.match(f"{_LADDER}.csv") or path.match(f"{_LADDER}.csv.gz")


def _of_ladder(path: Path, gpu: str) -> list[str]:
    frame, damaged = Log(path, records.LADDER).read()
    if damaged:  # the other rows are not numbered as in the file
        return [str(damage) for damage in damaged]
    if extra := [name for name in frame.columns if name not in records.LADDER.columns]:
        return [f"{path.name} has columns that a ladder's log has not: {', '.join(map(quoted, extra))}"]
    if frame.empty:
        return [f"{path} has no rows"]
    described = load_gpu(gpu) if gpu in gpu_names() else None
    frame = completed(frame)
    rows = {
        f"{path.name}, row {number + 2} ({row['kind']} {row['version']})": row
        for number, row in zip(frame.index, frame.to_dict("records"), strict=True)
    }
    if lacking := [f"{where}: it lacks {', '.join(names)}" for where, row in rows.items() if (names := _lacking(row))]:
        return lacking
    wrong = [f"{where}: {fault}" for where, row in rows.items() for fault in _of_row(row, described)]
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


def _lacking(row: Mapping[str, Any]) -> list[str]:
    """The cells that are empty, and that `flashladder ladder` writes."""
    may_lack = _NOT_ALWAYS | _OF_RUNGS if row["kind"] == FIELD else _NOT_ALWAYS
    return [name for name in records.LADDER.columns if name not in may_lack and (pd.isna(row[name]) or row[name] == "")]


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
    if words := records.bounds(row["window_left"], row["window_right"], row["softcap"]):
        yield f"its problem has a bound{words}: a ladder's problems have none"
        return
    try:
        problem = records.problem_of(row)
    except FlashLadderError as error:
        yield str(error)
        return
    yield from _of_speed(problem, float(row["time_us"]), gpu)
    if not math.isclose(row["tflops"], records.tflops(problem, row["time_us"]), rel_tol=ROUNDED):
        yield f"tflops={row['tflops']:.1f}, but its time gives {records.tflops(problem, row['time_us']):.1f}"
    if not math.isclose(row["ratio"], row["baseline_us"] / row["time_us"], rel_tol=OF_MEDIANS):
        yield f"ratio={row['ratio']:.3f}, but its times give {row['baseline_us'] / row['time_us']:.3f}"
    if not (row["control_low"] <= 1 + NOISY and row["control_high"] >= 1 - NOISY):
        yield f"the baseline differs from itself: {row['control_low']:.3f} to {row['control_high']:.3f}"
    yield from _of_rounds(row)


def _of_rounds(row: Mapping[str, Any]) -> Iterator[str]:
    """The times of rounds, from which figures follow."""
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
    try:
        yaml_files.check_plain(path.read_bytes())
    except yaml.YAMLError as error:
        raise ResultsError(f"{path} is damaged: {error}") from None
    found = winners.of_gpu(gpu, home.parent)
    wrong = [] if found else [f"{path} has no winners"]
    for winner in found:
        where = f"{path.name}, {winner.version}, {winner.kind}"
        wrong += [f"{where}: {fault}" for fault in _of_winner(winner, described)]
    return wrong


def _of_winner(winner: Winner, gpu: GpuDescription | None) -> Iterator[str]:
    try:
        evidence = _EVIDENCE.validate(winner.evidence)
    except ValueError as error:
        yield str(error)
        return
    yield from _of_place(evidence, gpu)
    try:
        winners.standing(winner)
    except FlashLadderError as error:
        yield str(error)
    ours, theirs, (ratio, low, high) = evidence["times_us"], evidence["baseline_us"], _interval(evidence["ratio"])
    try:
        problems = [problem_named(name) for name in evidence["problems"]]
    except (ValueError, FlashLadderError) as error:
        yield f"its problems cannot be read: {error}"
        return
    if not len(problems) == len(ours) == len(theirs):
        yield f"it has {len(problems)} problems, {len(ours)} times and {len(theirs)} of the baseline"
        return
    for problem, time_us in zip(problems, ours, strict=True):
        if winner.kind not in winners.names_for(problem)[:2]:  # of its class of lengths, or of any
            yield f"it was found with {problem.name}, which is of another kind"
        yield from _of_speed(problem, time_us, gpu)
    if not low <= ratio <= high:
        yield f"ratio={ratio:.3f} is not in its interval, {low:.3f} to {high:.3f}"
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
    if gpu is not None and (rate := records.tflops(problem, time_us)) > ABOVE_PEAK * gpu.dense_bf16_tflops:
        yield f"{rate:.0f} TFLOP/s is beyond the {gpu.dense_bf16_tflops:.0f} of a {gpu.title}"


def _interval(text: str) -> list[float]:
    """Value, low and high of a _Ratio."""
    return [float(number) for number in re.findall(r"[\d.]+", text)]


def problem_named(name: str) -> Problem:
    """The problem of a `Problem.name`; ValueError or UnsupportedProblemError for what is none."""
    texts: dict[str, str] = {}
    options = []
    for pair in name.split(","):
        field, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"{pair!r} is no field of a problem and its value")
        if field in _PROBLEM.columns:
            texts[field] = text
        else:
            options.append(pair)
    return records.problem_with(",".join(options), **_PROBLEM.validate(texts))
