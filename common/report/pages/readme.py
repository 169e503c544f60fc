"""The README's part on the ladder: for each GPU a chart and a table."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from flashladder.common import catalog
from flashladder.common.records import ladder_runs, ladders
from flashladder.common.records.ladder_runs import FIELD, FIXED, OWN, Ladder
from flashladder.common.report import formats
from flashladder.common.report.charts import ladder as ladder_chart
from flashladder.common.report.charts import theme
from flashladder.common.report.charts.theme import Chart, made_from
from flashladder.common.report.ladder_tables import configuration, official, on_two_cards, registers, step
from flashladder.common.report.sections import Section
from flashladder.common.report.tables import Rows, numbers
from flashladder.common.report.templating import render

MARKER = "ladder"
DRAWN_BY = tuple(Path(str(module.__file__)) for module in (theme, ladder_chart, ladders, ladder_runs))
Ladders = Mapping[str, Ladder]


def parts(readme: Path | None, folder: Path, shown: Ladders, summary: pd.DataFrame) -> list[Chart | Section]:
    """The charts beside the logs and, where there is one, the README's section."""
    charts = [_chart(folder, lines) for lines in _by_gpu(summary)]
    section = [Section(readme, MARKER, partial(text, readme, folder, shown, summary))] if readme else []
    return [*charts, *section]


def text(readme: Path, folder: Path, shown: Ladders, summary: pd.DataFrame) -> str:
    """The part, in Markdown: of the GPUs with a ladder of one run, and of joined ones where there is none."""
    whole = {gpu for gpu, ladder in shown.items() if ladder.is_one_run}
    gpus = {str(lines["gpu"].iloc[0]): lines for lines in _by_gpu(summary)}
    made = [_part(readme, folder, shown[gpu], lines) for gpu, lines in gpus.items() if gpu in whole or not whole]
    return render("ladder.md.j2", parts=made)


def _by_gpu(summary: pd.DataFrame) -> list[pd.DataFrame]:
    return [lines for _, lines in summary.groupby("gpu", sort=False)] if len(summary) else []


def _first_dtype(lines: pd.DataFrame) -> pd.DataFrame:
    return lines[lines["dtype"] == lines["dtype"].iloc[0]]


def _chart(folder: Path, lines: pd.DataFrame) -> Chart:
    first, log = _first_dtype(lines), _log(folder, lines)
    title = f"The ladder on {_gpu_title(lines)}, {first['dtype'].iloc[0]}"
    note = made_from(repr(ladders.titles()), log, *DRAWN_BY)
    return Chart(log.with_suffix(".svg"), title, partial(ladder_chart.ladder, first), note)


def _log(folder: Path, lines: pd.DataFrame) -> Path:
    return folder / f"ladder_{lines['gpu'].iloc[0]}.csv"


def _gpu_title(lines: pd.DataFrame) -> str:
    gpu = str(lines["gpu"].iloc[0])
    limits = ladders.Limits.of(gpu)
    return limits.title if limits else gpu


def _part(readme: Path, folder: Path, ladder: Ladder, lines: pd.DataFrame) -> dict[str, Any]:
    """What the template says of a GPU."""
    first = _first_dtype(lines)
    own = first[first["kind"] == OWN]
    log = _log(folder, lines)
    columns, rows = _table(lines)
    fewer = first[first["lengths"] < first["lengths"].max()].drop_duplicates("version")
    missing = [rung for rung in catalog.finished() if rung.name not in set(lines["version"])]
    return {
        "gpu": _gpu_title(lines),
        "dtype": first["dtype"].iloc[0],
        "best": own.loc[own["ratio"].idxmax()],
        "field": [f"{row.title} at {row.ratio:.2f}" for row in ladders.field(first).itertuples()],
        "steps": int(own["step"].notna().sum()),
        "gains": int((own["step_low"] > 1).sum()),
        "source": ladder.source,
        "chart": _chart(folder, lines).markup(readme),
        "columns": columns,
        "rows": rows,
        "lengths": first["lengths"].max(),
        "fewer": [f"{row.rung or row.title}: {row.lengths}" for row in fewer.itertuples()],
        "torch": first["torch"].iloc[0],
        "missing": [f"[{catalog.address_of(rung.name)}](versions/{rung.name}) ({rung.title})" for rung in missing],
        "log": f"[{folder.name}/{log.name}]({Path(os.path.relpath(log, readme.parent)).as_posix()})",
        "again": on_two_cards(first, ladder, in_full=True) if ladder.again else None,
    }


def _table(lines: pd.DataFrame) -> tuple[list[str], Rows]:
    """A line a rung: in full of the first dtype, of others the ratio."""
    first = _first_dtype(lines)
    others = [dtype for dtype in lines["dtype"].unique() if dtype != first["dtype"].iloc[0]]
    rows = []
    for version, group in first[first["kind"] != FIELD].groupby("version", sort=True):
        kinds = {row.kind: row for row in group.itertuples()}
        own, fixed = kinds[OWN], kinds.get(FIXED)
        cells = [f"[{own.rung}](versions/{version})", own.title, *_figures(own), step(own)]
        cells += [formats.ratio(fixed.ratio) if fixed else "", step(fixed)]
        cells += [_ratio(lines, version, dtype, OWN) for dtype in others]
        rows.append([*cells, registers(own), configuration(own)])
    rows.append(["", "FlashAttention-2", official(first), "1"])
    for row in ladders.field(first).itertuples():
        also = [_ratio(lines, row.version, dtype, FIELD) for dtype in others]
        rows.append(["", row.title, *_figures(row), "", "", "", *also])
    figures = numbers("TFLOP/s", "own", "95 %", "step", "fixed", "step", *others, "registers")
    return ["rung", "technique", *figures, "configuration"], rows


def _figures(row: Any) -> list[str]:
    interval = formats.interval(row.ratio_low, row.ratio_high)
    return [f"{row.tflops:.0f}", formats.bold(formats.ratio(row.ratio)), interval]


def _ratio(lines: pd.DataFrame, version: str, dtype: str, kind: str) -> str:
    found = lines[(lines["version"] == version) & (lines["dtype"] == dtype) & (lines["kind"] == kind)]["ratio"]
    return formats.ratio(found.iloc[0]) if len(found) else ""
