"""The ladder on results/ladder.md, in full: for each GPU a chart and a table."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pandas as pd

from flashladder.common import catalog
from flashladder.common.escape import Markdown, markdown
from flashladder.common.records import ladder_runs, ladders
from flashladder.common.records.ladder_runs import FIELD, FIXED, OWN, Ladder
from flashladder.common.records.run_files import RunLog
from flashladder.common.records.schemas import LADDER
from flashladder.common.report import formats
from flashladder.common.report.charts import ladder as ladder_chart
from flashladder.common.report.charts import theme
from flashladder.common.report.charts.theme import Chart, made_from
from flashladder.common.report.ladder_tables import (
    configuration,
    fixed_configuration,
    official,
    on_two_cards,
    registers,
    step,
)
from flashladder.common.report.sections import Section
from flashladder.common.report.tables import Rows, numbers
from flashladder.common.report.templating import render

MARKER = "ladder"
PAGE = "ladder.md"  # in the folder of results
DRAWN_BY = tuple(Path(str(module.__file__)) for module in (theme, ladder_chart, ladders, ladder_runs))


class Measured(NamedTuple):
    """What was measured on a GPU: the run, and its summary."""

    ladder: Ladder
    lines: pd.DataFrame

    @property
    def gpu(self) -> str:
        return str(self.lines["gpu"].iloc[0])

    @property
    def title(self) -> str:
        limits = ladders.Limits.of(self.gpu)
        return limits.title if limits else self.gpu

    @property
    def first(self) -> pd.DataFrame:
        """The lines of the first dtype."""
        return self.lines[self.lines["dtype"] == self.lines["dtype"].iloc[0]]

    @property
    def own(self) -> pd.DataFrame:
        """Of these the rungs, each in its own configuration."""
        return self.first[self.first["kind"] == OWN]

    @property
    def log(self) -> str:
        return f"ladder_{self.gpu}"

    def files(self, folder: Path) -> list[Path]:
        """Where the rows of its runs are."""
        return RunLog(folder, self.log, LADDER).files

    def chart(self, folder: Path) -> Chart:
        title = f"The ladder on {self.title}, {self.first['dtype'].iloc[0]}"
        note = made_from(repr(ladders.titles()), *self.files(folder), *DRAWN_BY)
        return Chart(folder / f"{self.log}.svg", title, partial(ladder_chart.ladder, self.first), note)


def measured(shown: Mapping[str, Ladder], summary: pd.DataFrame) -> Iterator[Measured]:
    """By GPU what there is."""
    if len(summary):
        for gpu, lines in summary.groupby("gpu", sort=False):
            yield Measured(shown[str(gpu)], lines)


def published(found: list[Measured]) -> list[Measured]:
    """Those whose ladder is of one run; where there is none, the joined ones."""
    return [each for each in found if each.ladder.is_one_run] or found


def sections(folder: Path, found: list[Measured]) -> list[Section]:
    """The page, where it has markers."""
    page = Section(folder / PAGE, MARKER, lambda: text(folder, published(found)))
    return [page] if page.has_place else []


def text(folder: Path, found: list[Measured]) -> str:
    """The tables, in Markdown."""
    return render("ladder_page.md.j2", parts=[_part(folder, each) for each in found])


def _part(folder: Path, of_gpu: Measured) -> dict[str, Any]:
    """What the template says of a GPU."""
    first = of_gpu.first
    own = of_gpu.own
    columns, rows = _table(of_gpu.lines, folder)
    fewer = first[first["lengths"] < first["lengths"].max()].drop_duplicates("version")
    missing = [rung for rung in catalog.finished() if rung.name not in set(of_gpu.lines["version"])]
    return {
        "gpu": of_gpu.title,
        "dtype": first["dtype"].iloc[0],
        "fixed": fixed_configuration(first),
        "steps": int(own["step"].notna().sum()),
        "gains": int((own["step_low"] > 1).sum()),
        "source": of_gpu.ladder.source,
        "chart": of_gpu.chart(folder).markup(folder / PAGE),
        "columns": columns,
        "rows": rows,
        "lengths": first["lengths"].max(),
        "fewer": [f"{row.rung or row.title}: {row.lengths}" for row in fewer.itertuples()],
        "torch": first["torch"].iloc[0],
        "missing": [Markdown(f"{link(rung.name, folder)} ({markdown(rung.title)})") for rung in missing],
        "log": of_gpu.log,
        "again": on_two_cards(first, of_gpu.ladder, in_full=True) if of_gpu.ladder.again else None,
    }


def link(version: str, folder: Path, title: str = "") -> Markdown:
    """To a rung's page, from a document in this folder."""
    place = Path(os.path.relpath(catalog.directory_of(version), folder)).as_posix()
    name = f"{catalog.address_of(version)} {title}".strip()
    return Markdown(f"[{markdown(name)}]({quote(place)})")


def _table(lines: pd.DataFrame, folder: Path) -> tuple[list[str], Rows]:
    """A line a rung: in full of the first dtype, of others the ratio."""
    first = lines[lines["dtype"] == lines["dtype"].iloc[0]]
    others = [dtype for dtype in lines["dtype"].unique() if dtype != first["dtype"].iloc[0]]
    rows = []
    for version, group in first[first["kind"] != FIELD].groupby("version", sort=True):
        kinds = {row.kind: row for row in group.itertuples()}
        own, fixed = kinds[OWN], kinds.get(FIXED)
        cells = [link(str(version), folder), own.title, *_figures(own), step(own)]
        cells += [formats.ratio(fixed.ratio) if fixed else "", step(fixed)]
        cells += [_ratio(lines, version, dtype, OWN) for dtype in others]
        rows.append([*cells, registers(own), configuration(own)])
    rows.append(["", "FlashAttention-2", official(first), "1"])
    for row in ladders.field(first).itertuples():
        also = [_ratio(lines, row.version, dtype, FIELD) for dtype in others]
        rows.append(["", row.title, *_figures(row), "", "", "", *also])
    figures = numbers(first["unit"].iloc[0], "own", "95 %", "step", "fixed", "step", *others, "registers")
    return ["rung", "technique", *figures, "configuration"], rows


def _figures(row: Any) -> list[str]:
    interval = formats.interval(row.ratio_low, row.ratio_high)
    return [formats.mean_rate(row.rate, row.unit), formats.bold(formats.ratio(row.ratio)), interval]


def _ratio(lines: pd.DataFrame, version: str, dtype: str, kind: str) -> str:
    found = lines[(lines["version"] == version) & (lines["dtype"] == dtype) & (lines["kind"] == kind)]["ratio"]
    return formats.ratio(found.iloc[0]) if len(found) else ""
