"""The README's parts on the first ladder, a chart and a table with figures; on other ladders' pages, milestones."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from flashladder.common import catalog
from flashladder.common.paths import ROOT, VERSIONS
from flashladder.common.records import ladders
from flashladder.common.records.ladder_runs import FIELD
from flashladder.common.report import formats
from flashladder.common.report.charts import ladder as ladder_chart
from flashladder.common.report.charts.theme import Chart, made_from
from flashladder.common.report.ladder_tables import official
from flashladder.common.report.pages.ladder import DRAWN_BY, MARKER, PAGE, Measured, link, published
from flashladder.common.report.sections import Section
from flashladder.common.report.tables import Rows, markdown, numbers
from flashladder.common.report.templating import render

PICTURE, MILESTONES = "picture", "milestones"  # mark where the chart and the other ladders' tables stand


def parts(readme: Path, folder: Path, found: list[Measured]) -> list[Chart | Section]:
    """The chart beside the logs, of one GPU, the one with most rungs, and what stands between the README's markers.

    Of the project's README also the milestones of each other ladder, on its page.
    """
    pages = (
        {ladder: VERSIONS / ladder / readme.name for ladder in catalog.ladders()[1:]} if readme.parent == ROOT else {}
    )
    others = [Section(page, MILESTONES, partial(_new, page, ladder)) for ladder, page in pages.items()]
    return [*_of_first(readme, folder, found), *(section for section in others if section.has_place)]


def _of_first(readme: Path, folder: Path, found: list[Measured]) -> list[Chart | Section]:
    if not found:
        return [Section(readme, MARKER, lambda: render("ladder.md.j2", rows=[]))]
    shown = max(published(found), key=lambda each: len(each.own))
    chart = _chart(folder, shown)
    picture = Section(readme, PICTURE, lambda: chart.markup(readme))
    table = Section(readme, MARKER, lambda: _text(readme, folder, shown))
    return [chart, *([picture] if picture.has_place else []), table]


def _milestones() -> dict[str, str]:
    """What is new in each milestone of the first ladder, by its number."""
    return {rung.number: rung.milestone for rung in catalog.finished() if rung.milestone}


def _new(page: Path, ladder: str) -> str:
    """The milestones of a ladder, with what is new in them."""
    rungs = [rung for rung in catalog.versions(ladder=ladder) if rung.milestone and not rung.draft]
    return markdown(
        ("rung", "what is new"), [(link(rung.name, page.parent, rung.title), rung.milestone) for rung in rungs]
    )


def _chart(folder: Path, shown: Measured) -> Chart:
    first = shown.first
    lines: pd.DataFrame = first[first["rung"].isin([*_milestones()]) | first["kind"].eq(FIELD)]
    note = made_from(repr((ladders.titles(), _milestones())), *shown.files(folder), *DRAWN_BY)
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
        missing=[
            link(rung.name, readme.parent)
            for rung in catalog.finished()
            if rung.milestone and rung.name not in set(shown.own["version"])
        ],
        page=Path(os.path.relpath(folder / PAGE, readme.parent)).as_posix(),
    )


def _rows(readme: Path, shown: Measured) -> Rows:
    """The milestones that were measured, and then the field."""
    rows: list[list[object]] = []
    milestones = _milestones()
    for row in shown.own.itertuples():
        if new := milestones.get(row.rung):
            rows.append([link(row.version, readme.parent, row.title), *_figures(row), new])
    rows.append(["FlashAttention-2, as torch ships it", official(shown.first), "1"])
    rows += [[row.title, *_figures(row)] for row in ladders.field(shown.first).itertuples()]
    return rows


def _figures(row: Any) -> list[str]:
    return [formats.mean_rate(row.rate, row.unit), formats.bold(f"{row.ratio:.2f}")]
