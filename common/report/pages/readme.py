"""The README's parts on the ladder: a chart, and a short table, of the rungs that matter most."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from flashladder.common import catalog
from flashladder.common.records import ladders
from flashladder.common.records.ladder_runs import FIELD
from flashladder.common.report import formats
from flashladder.common.report.charts import ladder as ladder_chart
from flashladder.common.report.charts.theme import Chart, made_from
from flashladder.common.report.ladder_tables import official
from flashladder.common.report.pages.ladder import DRAWN_BY, MARKER, PAGE, Measured, link, published
from flashladder.common.report.sections import Section
from flashladder.common.report.tables import Rows, numbers
from flashladder.common.report.templating import render

PICTURE = "picture"  # marks where the chart stands
MILESTONES = {  # the rungs of both, and what each has that the one before it lacks
    "00": "FlashAttention's algorithm on ordinary cores, in one short file",
    "01": "tensor cores",
    "02": "shared memory without bank conflicts",
    "09": "copies that overlap with products; fewer instructions beside the products",
    "24": "a softmax that rarely rescales, between the products; masks, any length",
    "25": "Hopper's matrix instruction, wgmma",
    "26": "Hopper's copy engine, TMA",
    "31": "a producer warp; CTAs that take tile after tile, so that a tile ends while the next one is copied",
    "37": "a softmax that does not look for maxima",
    "47": "no pause between tiles; windows, softcaps, packed sequences",
}


def parts(readme: Path, folder: Path, found: list[Measured]) -> list[Chart | Section]:
    """Of one GPU, the one with most rungs: the chart beside the logs, and what stands between the README's markers."""
    if not found:
        return [Section(readme, MARKER, lambda: render("ladder.md.j2", rows=[]))]
    shown = max(published(found), key=lambda each: len(each.own))
    chart = _chart(folder, shown)
    picture = Section(readme, PICTURE, lambda: chart.markup(readme))
    table = Section(readme, MARKER, lambda: _text(readme, folder, shown))
    return [chart, *([picture] if picture.has_place else []), table]


def _milestones() -> list[str]:
    return [rung.name for rung in catalog.finished() if rung.number in MILESTONES]


def _chart(folder: Path, shown: Measured) -> Chart:
    first = shown.first
    lines: pd.DataFrame = first[first["version"].isin(_milestones()) | first["kind"].eq(FIELD)]
    note = made_from(repr((ladders.titles(), MILESTONES)), *shown.files(folder), *DRAWN_BY)
    title = f"Milestones of the ladder on {shown.title}, {first['dtype'].iloc[0]}"
    return Chart(folder / f"milestones_{shown.gpu}.svg", title, partial(ladder_chart.ladder, lines), note)


def _text(readme: Path, folder: Path, shown: Measured) -> str:
    best = shown.own.loc[shown.own["ratio"].idxmax()]
    return render(
        "ladder.md.j2",
        gpu=shown.title,
        dtype=shown.first["dtype"].iloc[0],
        day=str(shown.ladder.runs[0].rows["time"].iloc[-1])[:10],
        best=link(best["version"], readme.parent),
        ratio=best["ratio"],
        columns=["rung", *numbers("TFLOP/s", "ratio"), "what is new"],
        rows=_rows(readme, shown),
        lengths=shown.first["lengths"].max(),
        missing=[link(name, readme.parent) for name in _milestones() if name not in set(shown.own["version"])],
        page=Path(os.path.relpath(folder / PAGE, readme.parent)).as_posix(),
    )


def _rows(readme: Path, shown: Measured) -> Rows:
    """The milestones that were measured, and then the field."""
    rows: list[list[object]] = []
    for row in shown.own.itertuples():
        if new := MILESTONES.get(row.rung):
            rows.append([link(row.version, readme.parent, row.title), *_figures(row), new])
    rows.append(["FlashAttention-2, as torch ships it", official(shown.first), "1"])
    rows += [[row.title, *_figures(row)] for row in ladders.field(shown.first).itertuples()]
    return rows


def _figures(row: Any) -> list[str]:
    return [formats.mean_rate(row.rate, row.unit), formats.bold(f"{row.ratio:.2f}")]
