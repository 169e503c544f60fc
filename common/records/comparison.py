"""Two logged benchmarks side by side: what differs between them, and the ratios of each, which are never divided.

Times of two runs are of other moments, often of other cards: only what was timed in the same rounds has a ratio.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from flashladder.common.errors import ResultsError, unknown
from flashladder.common.own import FIRST
from flashladder.common.records.ladders import mean_ratio
from flashladder.common.records.log import Damage, Log, Schema, open_text
from flashladder.common.records.schemas import EXPERIMENT, LADDER

CIRCUMSTANCES = {
    "device": "card",
    "gpu_id": "card's id",
    "power_limit_w": "power limit, W",
    "commit": "commit",
    "driver": "driver",
    "torch": "torch",
    "toolkit": "CUDA",
    "mode": "mode",
    "baseline": "ratios to",
    "baseline_version": "its version",
}
KERNEL = ["kind", "label", "version", "dtype", "causal"]  # what the ratios of one line have in common
PROBLEM = [
    *("batch", "num_heads", "num_heads_k", "seqlen_q", "seqlen_k", "head_dim", "layout", "family", "lse"),
    *("window_left", "window_right", "softcap", "operation", "head_dim_v", "options"),
]
_USUAL = {
    **dict.fromkeys(("kind", "label", "config", "code"), ""),
    **dict.fromkeys(("window_left", "window_right"), "all"),
    "layout": "bshd",
    "family": "normal",
    "lse": True,
    "softcap": 0.0,
    "operation": FIRST,
    "head_dim_v": "as head_dim",
    "options": "",
}
_BENCHMARK = {"run", "ratio", "seqlen_q"}  # columns that the log of a benchmark has, and no other file
_COMPARED = "Ratios to a baseline are compared, which bench, ladder and experiment log"
_FILE = re.compile(r"(?P<file>.*\.csv(\.gz)?)(:(?P<run>.*))?")
_SCHEMA = Schema({**LADDER.columns, **EXPERIMENT.columns})  # of every log with ratios


@dataclass(frozen=True)
class LoggedRun:
    """The rows of one run that have ratios."""

    name: str
    file: Path
    rows: pd.DataFrame
    damaged: tuple[Damage, ...]

    def circumstances(self) -> dict[str, str]:
        """Under what it was measured, by CIRCUMSTANCES' words; several values with commas between."""
        found = {word: self.rows[name].dropna().unique() for name, word in CIRCUMSTANCES.items()}
        return {word: ", ".join(sorted(map(_spell, values))) for word, values in found.items()}


@dataclass(frozen=True)
class ComparedKernel:
    """A kernel in both runs: its configurations, whether its machine code is the same, and its own ratios.

    A ratio has its mean and its 95 % interval, over the shapes that both runs timed it at.
    """

    kernel: Mapping[str, Any]  # by KERNEL
    shapes: int
    configs: tuple[str, str]
    is_same_code: bool
    ratios: tuple[tuple[float, float, float], tuple[float, float, float]]

    @property
    def title(self) -> str:
        """The kernel in words: "24_woven_general own, bf16, causal"."""
        kernel = self.kernel
        name = " ".join(filter(None, (kernel["version"], kernel["label"], kernel["kind"])))
        return ", ".join(filter(None, (name, kernel["dtype"], "causal" if kernel["causal"] else "")))

    @property
    def differs(self) -> bool:
        """Whether its code, its configuration or, beyond both intervals, its ratio is another."""
        (_, low, high), (_, other_low, other_high) = self.ratios
        is_apart = high < other_low or other_high < low
        return is_apart or not self.is_same_code or self.configs[0] != self.configs[1]

    @property
    def differing_fields(self) -> tuple[str, str]:
        """Of the two configurations what differs; empty where nothing does."""
        one, other = (dict(word.partition("=")[::2] for word in config.split(",")) for config in self.configs)
        names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        first, second = (
            ",".join(f"{name}={fields[name]}" for name in names if name in fields) for fields in (one, other)
        )
        return first, second


def load(what: str, folder: Path) -> LoggedRun:
    """The run that is called by its name, by a CSV file, or by both as FILE:RUN where the file has several.

    Raises ResultsError where there is no such run, or none with ratios; ConfigError for a name that no log has.
    """
    file, name = _place(what, folder)
    rows, damaged = Log(file, _SCHEMA).read()
    rows = rows[rows["run"] == name]
    filled = {
        column: rows[column].astype(object).where(rows[column].notna() & rows[column].ne(""), value)
        for column, value in _USUAL.items()
    }
    timed = rows.assign(**filled)[rows["ratio"].notna()]
    if timed.empty:
        raise ResultsError(f"the run {name} in {file} has no ratios to a baseline, which is what is compared")
    latest = timed.drop_duplicates([*KERNEL, *PROBLEM, "config"], keep="last")
    return LoggedRun(name, file, latest, tuple(damaged))


def _place(what: str, folder: Path) -> tuple[Path, str]:
    """The file and the name of a run."""
    if called := _FILE.fullmatch(what):
        file, name = Path(called["file"]), called["run"]
        known = _runs(file)
        if not file.exists():
            raise ResultsError(f"{file} is not there")
        if not known:
            raise ResultsError(f"{file} is no log of a benchmark. {_COMPARED}")
        if name and name not in known:
            raise unknown(f"run in {file} is called", name, known)
        if not name and len(known) > 1:
            raise ResultsError(f"{file} has several runs, {', '.join(known)}: name one, as {file}:{known[-1]}")
        return file, name or known[0]
    files = sorted(path for ending in ("csv", "csv.gz") for path in folder.rglob(f"*.{ending}"))
    found = {run: file for file in files for run in _runs(file)}
    if what in found:
        return found[what], what
    if others := [file for file in files if what in _runs(file, {"run"})]:
        raise ResultsError(f"the run {what} in {others[0]} is no benchmark. {_COMPARED}")
    if not found:
        raise ResultsError(f"no run in the logs of {folder} is a benchmark. {_COMPARED}")
    raise unknown(f"run in the logs of {folder} is called", what, sorted(found))


def _runs(file: Path, columns: Set[str] = _BENCHMARK) -> list[str]:
    """The names of the runs in a file, in its order; none where it lacks one of the columns."""
    try:
        with open_text(file) as lines:
            reader = csv.DictReader(lines)
            if not columns <= set(reader.fieldnames or ()):
                return []
            return list(dict.fromkeys(row["run"] for row in reader if row["run"]))
    except OSError:
        return []


def compare(first: LoggedRun, second: LoggedRun) -> list[ComparedKernel]:
    """Each kernel that both timed at a shape, in the order of the first."""
    keys = [*KERNEL, *PROBLEM]
    if any(run.rows.duplicated(keys).any() for run in (first, second)):  # a kernel in several configurations
        keys.append("config")
    columns = [*keys, *({"config"} - {*keys}), "code", "ratio", "ratio_low", "ratio_high"]
    both = first.rows[columns].merge(second.rows[columns], on=keys, suffixes=("", " of second"))
    compared = []
    for _, rows in both.groupby([name for name in keys if name not in PROBLEM], sort=False):
        own = rows[[*keys, *columns[len(keys) :]]]
        other = rows[keys].assign(**{name: rows[f"{name} of second"] for name in columns[len(keys) :]})
        compared.append(
            ComparedKernel(
                {name: rows[name].iloc[0] for name in KERNEL},
                len(rows),
                (_configs(own), _configs(other)),
                list(own["code"]) == list(other["code"]),
                (mean_ratio(own), mean_ratio(other)),
            )
        )
    return compared


def kernels_of(run: LoggedRun) -> set[str]:
    """The rungs and the kernels of the field that a run timed."""
    return set(run.rows["version"])


def _configs(rows: pd.DataFrame) -> str:
    """The configuration; of a kernel that each shape configures anew, the first."""
    return str(rows["config"].iloc[0])


def _spell(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
