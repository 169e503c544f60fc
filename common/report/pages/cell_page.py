"""A ladder's cells beside official kernels on results/LADDER.md, in full: for each GPU a chart and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from flashladder.common.measure import baselines
from flashladder.common.problem.config import gpu_names, load_gpu
from flashladder.common.records import cell_results
from flashladder.common.records.cell_results import CellResult
from flashladder.common.records.run_files import RunLog
from flashladder.common.records.schemas import BENCH
from flashladder.common.records.slowdowns import remarks
from flashladder.common.report import cell_tables
from flashladder.common.report.charts import cells as cell_chart
from flashladder.common.report.charts import theme
from flashladder.common.report.charts.theme import Chart, made_from
from flashladder.common.report.sections import Section
from flashladder.common.report.templating import render

MARKER = "cells"
_DRAWN_BY = tuple(Path(str(module.__file__)) for module in (theme, cell_chart, cell_tables, cell_results))

Logged = Mapping[str, Mapping[str, pd.DataFrame]]  # rows by ladder and GPU


def parts(folder: Path, logged: Logged) -> Iterator[Chart | Section]:
    """The charts, and the pages that have markers."""
    for ladder, of_gpus in logged.items():
        charts = {gpu: chart(folder, ladder, gpu, rows) for gpu, rows in of_gpus.items()}
        yield from charts.values()
        page = Section(folder / f"{ladder}.md", MARKER, partial(_text, folder, ladder, of_gpus, charts))
        if page.has_place:
            yield page


def chart(folder: Path, ladder: str, gpu: str, rows: pd.DataFrame) -> Chart:
    """The picture of one GPU: of cells that official kernels take too, if there are any."""
    found = cell_results.results(rows)
    cells = [cell for cell in found if cell.ratio()] or found
    groups = {
        group: [(", ".join(place), row) for place, row in cell_tables.rows_of(among)]
        for group, among in cell_tables.by_group(cells).items()
    }
    titles = {name: cell_tables.title_of(name) for name in cell_results.kernels(cells)}
    note = made_from(repr(titles), *RunLog(folder, f"{ladder}_{gpu}", BENCH).files, *_DRAWN_BY)
    title = f"Cells of the ladder {ladder} on {gpu_title(gpu)}"
    return Chart(folder / f"{ladder}_{gpu}.svg", title, partial(cell_chart.ratios, groups, titles), note)


def _text(folder: Path, ladder: str, of_gpus: Mapping[str, pd.DataFrame], charts: Mapping[str, Chart]) -> str:
    """The page's part."""
    page = folder / f"{ladder}.md"
    made = [
        {"gpu": gpu_title(gpu), "chart": charts[gpu].markup(page), "log": f"{ladder}_{gpu}", **_tables(rows)}
        for gpu, rows in of_gpus.items()
    ]
    return render("cell_page.md.j2", parts=made)


def _tables(rows: pd.DataFrame) -> dict[str, Any]:
    cells: list[CellResult] = cell_results.results(rows)
    return {
        "overview": cell_tables.overview(cells),
        "groups": [*cell_tables.of_groups(cells)],
        "source": _source(rows),
    }


def gpu_title(gpu: str) -> str:
    """A known GPU's title, or the name as it is."""
    return load_gpu(gpu).title if gpu in gpu_names() else gpu


def _source(rows: pd.DataFrame) -> str:
    """Where, when and with what."""

    def words(name: str, before: str = "") -> str:
        return before + ", ".join(sorted({str(value) for value in rows[name].dropna() if value != ""}))

    theirs = rows[rows["version"].isin([*baselines.titles()])]
    releases = dict.fromkeys(f"{baselines.titles()[row.version]} {row.release}" for row in theirs.itertuples())
    where = [words("device"), words("run", "run "), words("gpu_id", "card "), words("commit", "commit ")]
    software = [words("driver", "driver "), words("torch", "torch "), words("toolkit", "CUDA "), *releases]
    tokens = f"{(rows['batch'] * rows['seqlen_q']).max():,}"
    days = ", ".join(sorted({str(time)[:10] for time in rows["time"]}))
    shape = f"{words('num_heads')} heads, up to {tokens} tokens, {words('mode')}"
    return f"{', '.join(where)}; {shape}; {', '.join(software)}; {days}.{remarks(rows)}"
