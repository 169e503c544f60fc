"""The CSV logs of the lab: appended by many processes at once, read by whoever wants a figure.

A row is one line, written in one go under a lock, so that a killed writer harms at most its own row: the next writer
sets a torn last line aside in NAME.torn. Rows that make no sense are reported, by who reads and by who appends, and
left where they are.
"""

from __future__ import annotations

import csv
import fcntl
import gzip
import io
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from typing_extensions import Required, TypedDict

from flashladder.common.console import warn
from flashladder.common.errors import ResultsError
from flashladder.common.escape import quoted
from flashladder.common.paths import cache_dir
from flashladder.common.records import cells

if TYPE_CHECKING:
    import pandas as pd

Cell = str | int | float | bool | None


@dataclass(frozen=True)
class Schema:
    """The columns of a log, in order, each with what its cells may hold, which `cells` has; a plain type will do.

    A cell may be empty, unless its column is required, or one of `figures`, which a row has all if it has the first.
    A figure with NAME_low and NAME_high lies between them.
    """

    columns: Mapping[str, Any]
    required: Collection[str] = ()
    figures: Sequence[str] = ()

    def line(self, row: Mapping[str, Cell], header: Sequence[str]) -> str:
        """The row as a line under a file's header, which has all columns and may have more."""
        if unknown := row.keys() - self.columns.keys():
            raise ResultsError(f"unknown columns {', '.join(sorted(unknown))}; known: {', '.join(self.columns)}")
        return _csv_line([_spell(row.get(name)) for name in header])

    def parse(self, line: str, header: Sequence[str]) -> list[Cell]:
        """The cells of a line. ValueError, saying why, where the line is no row."""
        if not line.endswith("\n"):
            raise ValueError("torn: the line has no end")
        texts = _cells(line)
        if len(texts) != len(header):
            raise ValueError(f"{len(texts)} cells under {len(header)} columns")
        row = self.validate(dict(zip(header, texts, strict=True)))
        return [row.get(name, text or self.empty(name)) for name, text in zip(header, texts, strict=True)]

    def validate(self, texts: Mapping[str, Any]) -> dict[str, Any]:
        """The values of cells, without the empty ones. ValueError names each that is wrong, and what is right."""
        try:
            row = self._row.validate_python({name: text for name, text in texts.items() if text})
        except ValidationError as invalid:
            raise ValueError("; ".join(map(_in_words, invalid.errors()))) from None
        if row.keys() & self.figures[:1] and (lacking := [name for name in self.figures if name not in row]):
            raise ValueError(f"it has {self.figures[0]}, and lacks {', '.join(lacking)}")
        for name in self._intervals:
            low, value, high = (row.get(column) for column in (f"{name}_low", name, f"{name}_high"))
            bounds = [bound for bound in (low, value, high) if bound is not None]
            if bounds != sorted(bounds):
                figure = name if value is None else f"{name}={value:.3f}"
                raise ValueError(f"{figure} is not in its interval, {low:.3f} to {high:.3f}")
        return row

    @cached_property
    def _row(self) -> TypeAdapter[dict[str, Any]]:
        kinds = {name: cells.kind(column) for name, column in self.columns.items()}
        row = {name: Required[kind] if name in self.required else kind for name, kind in kinds.items()}
        return TypeAdapter(TypedDict("Row", row, total=False))  # type: ignore[operator]

    @cached_property
    def _intervals(self) -> list[str]:
        return [name.removesuffix("_low") for name in self.columns if name.endswith("_low")]

    def empty(self, name: str) -> Cell:
        """What an empty cell of a column comes to."""
        return "" if cells.base(self.columns.get(name, str)) is str else None


def _in_words(error: ErrorDetails) -> str:
    """What is wrong with a cell."""
    name = error["loc"][0]
    if error["type"] == "missing":
        return f"it lacks {name}"
    words = error["msg"].removeprefix("Input ")
    return f"{name}={quoted(str(error['input']))} {words[0].lower()}{words[1:]}"


@dataclass(frozen=True)
class Damage:
    """A line that is no row."""

    file: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


class Log:
    """A CSV file of one schema. A file of an older schema gains the new columns at its next row."""

    def __init__(self, path: Path, schema: Schema) -> None:
        self.path = path
        self.schema = schema
        self._is_read = False

    def append(self, rows: Sequence[Mapping[str, Cell]]) -> None:
        """Add rows. Warns of lines that are none, if `read` has not given them yet.

        Raises ResultsError where the file cannot be written or is another table.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.lock():
                self._set_torn_line_aside()
                self.report()
                header = self._complete_header()
                with open_text(self.path, "a") as file:
                    _write(file, (self.schema.line(row, header) for row in rows))
        except OSError as error:
            raise ResultsError(f"cannot write {self.path}: {error.strerror or error}. {self._remedy()}") from error

    def read(self) -> tuple[pd.DataFrame, list[Damage]]:
        """The rows as a data frame with the schema's columns first, and the lines that are none.

        A file that is not there has no rows. Raises ResultsError where the first line is no header.
        """
        return read_logs([self], self.schema)

    def _remedy(self) -> str:
        if self.path.is_relative_to(cache_dir()):
            return "Set FLASHLADDER_CACHE to a folder that can be written"
        return "Set FLASHLADDER_RESULTS to a folder that can be written, or give --no-log where the command has it"

    def report(self) -> None:
        """Warn of the lines that are no rows, unless they are known already."""
        if not self._is_read:
            for damage in self.parse()[2]:
                warn(f"{damage}; the line is left where it is")

    def parse(self) -> tuple[list[str], list[list[Cell]], list[Damage]]:
        """The header, the rows under it, and the lines that are none."""
        header, lines = self._header(), self._lines()
        rows, damaged = [], []
        for number, line in enumerate(lines[1:], start=2):
            try:
                rows.append(self.schema.parse(line, header))
            except ValueError as error:
                damaged.append(Damage(self.path, number, str(error)))
        self._is_read = True
        return header, rows, damaged

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One writer at a time; the system lets go of a killed writer's lock."""
        with self.path.with_name(f".{self.path.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _set_torn_line_aside(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("r+b") as file:
            content = file.read()
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                aside = self.path.with_name(f"{self.path.name}.torn")
                warn(
                    f"{self.path}:{content[:whole].count(10) + 1}: torn: the line has no end; it is now in {aside.name}"
                )
                with aside.open("ab") as torn:
                    torn.write(content[whole:] + b"\n")
                    torn.flush()
                    os.fsync(torn.fileno())
                file.truncate(whole)

    def _complete_header(self) -> list[str]:
        """The file's header, once the file has every column of the schema."""
        header = self._header()
        missing = [name for name in self.schema.columns if name not in header]
        if missing:
            rows = [self._widened(line, header, len(missing)) for line in self._lines()[1:]]
            temporary = self.path.with_name(f".{self.path.name}.new")
            with open_text(temporary, "w") as file:
                _write(file, [_csv_line([*header, *missing]), *rows])
            temporary.replace(self.path)
        return [*header, *missing]

    def _widened(self, line: str, header: list[str], by: int) -> str:
        """A row with empty cells for new columns; a damaged line as it is."""
        try:
            self.schema.parse(line, header)
        except ValueError:
            return line
        return _csv_line([*_cells(line), *[""] * by])

    def _header(self) -> list[str]:
        """The columns of the file; none where it is not there or empty."""
        if not self.path.exists():
            return []
        with open_text(self.path, "r") as file:
            line = file.readline()
        try:
            header = _cells(line)
        except ValueError:
            header = []
        known = set(header) & self.schema.columns.keys()
        if line and (not known or len(set(header)) < len(header)):
            raise ResultsError(
                f"{self.path}:1: this is no header of this log: {line.strip()[:80]!r}; "
                f"move the file away, or give it back its first line: {','.join(self.schema.columns)}"
            )
        return header

    def _lines(self) -> list[str]:
        if not self.path.exists():
            return []
        with open_text(self.path, "r") as file:
            return list(file)


def open_text(path: Path, mode: str = "r") -> IO[str]:
    """Text whose lines end at a newline and nowhere else, and whose damaged bytes survive a round trip.

    A spreadsheet's mark at the beginning is not read.
    """
    encoding = "utf-8-sig" if mode == "r" else "utf-8"
    if path.suffix == ".gz":
        return cast("IO[str]", gzip.open(path, f"{mode}t", encoding=encoding, errors="surrogateescape", newline="\n"))
    return path.open(mode, encoding=encoding, errors="surrogateescape", newline="\n")


def _write(file: IO[str], lines: Iterable[str]) -> None:
    """Write in one go, and wait for the disk."""
    file.write("".join(lines))
    file.flush()
    os.fsync(file.fileno())


def _cells(line: str) -> list[str]:
    """The cells of a line. ValueError where it is no CSV."""
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error as error:
        raise ValueError(f"no CSV: {error}") from None


def _csv_line(cells: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _spell(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(str(value).split())  # a row is one line


def read_logs(logs: Iterable[Log], schema: Schema) -> tuple[pd.DataFrame, list[Damage]]:
    """The rows of several logs of one schema, as `Log.read` gives those of one."""
    import pandas as pd

    parsed = [log.parse() for log in logs]
    header = list(dict.fromkeys(name for names, _, _ in parsed for name in names))
    empty = {name: schema.empty(name) for name in header}
    rows = [empty | dict(zip(names, row, strict=True)) for names, found, _ in parsed for row in found]
    extra = [name for name in header if name not in schema.columns]
    frame = pd.DataFrame(rows, columns=header).reindex(columns=[*schema.columns, *extra])
    return frame, [damage for _, _, damaged in parsed for damage in damaged]
