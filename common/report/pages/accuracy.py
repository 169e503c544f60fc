"""results/accuracy.md: the charts and the table of the latest study on a GPU, between markers in a page of prose."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from flashladder.common.own import FIRST
from flashladder.common.problem.config import listing
from flashladder.common.report import accuracy
from flashladder.common.report.charts.accuracy import errors
from flashladder.common.report.charts.theme import Chart
from flashladder.common.report.sections import Section, marked
from flashladder.common.report.templating import render

MARKER = "accuracy"


def parts(page: Path, frame: pd.DataFrame) -> list[Chart | Section]:
    """The page, begun where there is none, and its charts, by the log."""
    operation = frame["operation"]  # older rows have none
    rows = accuracy.latest(frame[operation.isna() | operation.isin(("", FIRST))])
    begins = f"# How exact\n\n{marked(MARKER)}\n"
    return [*_charts(page, rows), Section(page, MARKER, partial(text, page, rows), begins)]


def text(page: Path, rows: pd.DataFrame) -> str:
    """The part between the markers, in Markdown."""
    judged, counted = (rows[rows["has"] == what] for what in (accuracy.ERRORS, accuracy.TILES))
    return render(
        "accuracy.md.j2",
        charts=[chart.markup(page) for chart in _charts(page, rows)],
        columns=["kernel", *accuracy.COLUMNS],
        rows=[[accuracy.title(kernel.version), *kernel.cells()] for kernel in accuracy.kernels(rows)],
        missed=accuracy.missed(rows),
        judged=[_measured(of_device) for _, of_device in judged.groupby("device")],
        counted=counted.iloc[-1] if len(counted) else None,
    )


def _measured(of_device: pd.DataFrame) -> dict[str, Any]:
    """The last row of a device, with its kernels and its lengths."""
    kernels = [accuracy.short(str(name)) for name in sorted(of_device["version"].unique())]
    lengths = ", ".join(f"{keys:,}" for keys in sorted(of_device["seqlen_k"].unique()))
    return {**of_device.iloc[-1], "kernels": kernels, "lengths": lengths}


def _charts(page: Path, rows: pd.DataFrame) -> list[Chart]:
    """One for each dtype."""
    return [
        Chart(
            page.with_name(f"{page.stem}_{dtype}.svg"),
            f"Errors by family of inputs, {dtype}, on {listing(of_dtype['device'].unique())}",
            partial(errors, of_dtype),
        )
        for dtype, of_dtype in rows[rows["has"] == accuracy.ERRORS].groupby("dtype")
    ]
