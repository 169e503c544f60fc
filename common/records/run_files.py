"""Logs of a file a run: results/runs/LOG@RUN.csv.gz, which nothing changes once its run has ended.

While a run goes on, its rows are in LOG@RUN.csv, as `Log` appends them; `seal` compresses that at the end. The CSV of a
killed run stays, is read like the others, and may be gone on with. A log without runs, results/LOG.csv or LOG.csv.gz,
is read before them.
"""

from __future__ import annotations

import gzip
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flashladder.common.console import warn
from flashladder.common.errors import ResultsError
from flashladder.common.escape import quoted
from flashladder.common.records.log import Cell, Damage, Log, Schema, read_logs

if TYPE_CHECKING:
    import pandas as pd

FOLDER = "runs"  # in a folder of results
INDEX = "index.csv"  # in that
_INDEXED = ("device", "gpu_id", "commit", "time")
_ENDINGS = ("csv", "csv.gz")
SCRATCH = "bench"  # what is logged under no name: of this checkout alone, and in no index


class RunLog:
    """The runs of one kind of log in a folder of results; `name` may have folders before it."""

    def __init__(self, folder: Path, name: str, schema: Schema) -> None:
        self.folder = folder
        self.name = name
        self.schema = schema
        self.path = folder / FOLDER  # once a run is logged, its file
        self._unsealed: dict[str, Log] = {}

    @property
    def files(self) -> list[Path]:
        """Where its rows are, in the order of the runs' names."""
        return [*_older(self.folder, self.name), *sorted(_runs(self.folder, self.name), key=_run)]

    def append(self, rows: Sequence[Mapping[str, Cell]]) -> None:
        """Add rows, each to the file of its run. ResultsError where that cannot be written."""
        for run, of_run in itertools.groupby(rows, key=lambda row: str(row["run"])):
            self.path = self.folder / FOLDER / f"{self.name}@{run}.csv"
            log = self._unsealed.setdefault(run, Log(self.path, self.schema))
            log.append([*of_run])

    def seal(self) -> None:
        """Compress what was appended: those runs have ended."""
        for log in self._unsealed.values():
            self.path = _seal(log)
        self._unsealed.clear()

    def read(self) -> tuple[pd.DataFrame, list[Damage]]:
        """The rows of all runs as a data frame with the schema's columns first, and the lines that are none."""
        return read_logs((Log(path, self.schema) for path in self.files), self.schema)

    def report(self) -> None:
        """Warn of the lines that are no rows."""
        for damage in self.read()[1]:
            warn(f"{damage}; the line is left where it is")


def _seal(log: Log) -> Path:
    """Compresses a CSV; a run that had ended before gets a further file."""
    try:
        with log.lock():
            names = itertools.chain([log.path.stem], (f"{log.path.stem}+{more}" for more in itertools.count(2)))
            sealed = next(path for name in names if not (path := log.path.with_name(f"{name}.csv.gz")).exists())
            write(sealed, log.path.read_bytes())
            log.path.unlink()
    except OSError as error:
        raise ResultsError(f"cannot write {log.path.parent}: {error.strerror or error}") from error
    return sealed


def write(path: Path, content: bytes) -> None:
    """Writes a compressed file, whole or not at all; the same content makes the same file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(gzip.compress(content, mtime=0))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def gpu_of(path: Path, pattern: str) -> str:
    """The GPU that stands for a pattern's `*` in the name of a file's log; ResultsError where that is none."""
    first, _, last = pattern.partition("*")
    gpu = _log(path).removeprefix(first).removesuffix(last)
    if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", gpu):
        raise ResultsError(f"{quoted(path.name)} should be {pattern} with a GPU's name, such as h100 or l40s-142sm")
    return gpu


def read_all(folder: Path, pattern: str, schema: Schema, damaged: list[Damage]) -> dict[str, pd.DataFrame]:
    """The logs of a folder that a pattern names, by the GPU that stands for its `*`; damaged rows go to `damaged`.

    Raises ResultsError where that is no name of a GPU.
    """
    place, _, _ = pattern.rpartition("/")
    frames = {}
    names = {_log(path): path for path in [*_older(folder, pattern), *_runs(folder, pattern)]}
    for name in sorted(names):
        gpu = gpu_of(names[name], pattern.removeprefix(f"{place}/"))
        frames[gpu], wrong = RunLog(folder, f"{place}/{name}".lstrip("/"), schema).read()
        damaged.extend(wrong)
    return frames


def index(folder: Path) -> pd.DataFrame:
    """A line for each run's file in a folder of results, by its name, but for those of SCRATCH."""
    import pandas as pd

    home, lines = folder / FOLDER, []
    for path in sorted(home.rglob("*@*.csv.gz")):
        if _log(path) != SCRATCH:
            rows = pd.read_csv(path, dtype=str)
            last = rows.iloc[-1]
            facts = {name: last.get(name) for name in _INDEXED}
            lines.append({"file": path.relative_to(home).as_posix(), "log": _log(path), **facts, "rows": len(rows)})
    return pd.DataFrame(lines)


def _older(folder: Path, name: str) -> Iterator[Path]:
    """The logs of all runs, by a name or a pattern."""
    return (path for ending in _ENDINGS for path in folder.glob(f"{name}.{ending}"))


def _runs(folder: Path, name: str) -> list[Path]:
    return [path for ending in _ENDINGS for path in (folder / FOLDER).glob(f"{name}@*.{ending}")]


def _log(path: Path) -> str:
    """The name of a file's log: ladder_h100 of ladder_h100.csv and of ladder_h100@RUN.csv.gz."""
    return path.name.removesuffix(".gz").removesuffix(".csv").partition("@")[0]


def _run(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".csv").partition("@")[2]
