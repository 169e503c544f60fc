"""results/accuracy.md: the pictures and the table of the latest study on a GPU, between markers in a page of prose."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from flashladder.common.report import markers, theme
from flashladder.common.report.accuracy import figures, view

MARKER = "accuracy"
NOTHING = "Nothing has been measured yet: `flashladder accuracy`, on a machine with a GPU, fills this page."


def write(page: Path, frame: pd.DataFrame) -> list[Path]:
    """Brings the page and its pictures up to date with the log, beginning a page where there is none; what changed."""
    if not page.exists():
        page.write_text(f"# How exact\n\n<!-- {MARKER}:begin -->\n<!-- {MARKER}:end -->\n")
    rows = view.latest(frame)
    pictures = []
    for dtype, of_dtype in rows[rows["has"] == view.ERRORS].groupby("dtype"):
        pictures += theme.write(figures.errors(of_dtype), _picture(page, str(dtype)), _title(of_dtype))
    return pictures + ([page] if markers.replace(page, MARKER, text(page, rows)) else [])


def text(page: Path, rows: pd.DataFrame) -> str:
    """The part between the markers, in Markdown."""
    if rows.empty:
        return NOTHING
    judged, counted = rows[rows["has"] == view.ERRORS], rows[rows["has"] == view.TILES]
    pictures = [_shown(page, of_dtype) for _, of_dtype in judged.groupby("dtype")]
    beyond = [f"- {line}" for line in view.missed(rows)]
    last, lengths = judged.iloc[-1], ", ".join(f"{keys:,}" for keys in sorted(judged["seqlen_k"].unique()))
    source = (
        f"Measured on {last['device']}, driver {last['driver']}, torch {last['torch']}, {last['time'][:10]};\n"
        f"{last['num_heads']} heads of {last['seqlen_q']} queries, {lengths} keys.\n"
        f"{_source_of(counted)}Made by `flashladder accuracy` from [accuracy.csv](accuracy.csv)."
    )
    listed = "\n".join(["Beyond a bar:", "", *beyond]) if beyond else "No rung is beyond a bar."
    return "\n\n".join([*pictures, "\n".join(_table(rows)), listed, source])


def _source_of(counted: pd.DataFrame) -> str:
    """Where tiles were counted."""
    if counted.empty:
        return ""
    last = counted.iloc[-1]
    return f"Tiles counted by the emulator: {last['seqlen_q']} queries, {last['seqlen_k']:,} keys.\n"


def _picture(page: Path, dtype: str) -> Path:
    return page.with_name(f"{page.stem}_{dtype}.svg")


def _title(rows: pd.DataFrame) -> str:
    return f"Errors by family of inputs, {rows['dtype'].iloc[0]}, on {rows['device'].iloc[0]}"


def _shown(page: Path, rows: pd.DataFrame) -> str:
    files = theme.files(_picture(page, str(rows["dtype"].iloc[0])))
    return (
        f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="{files["dark"].name}">\n'
        f'  <img alt="{_title(rows)}" src="{files["light"].name}">\n</picture>'
    )


def _table(rows: pd.DataFrame) -> list[str]:
    rule = ["---:" if column in view.FIGURES else "---" for column in view.COLUMNS]
    lines = [["kernel", *view.COLUMNS], ["---", *rule]]
    lines += [[view.title(kernel.version), *kernel.cells()] for kernel in view.kernels(rows)]
    return [f"| {' | '.join(cells)} |" for cells in lines]
