"""What you call, and what it gives beside the fastest official kernel: the README's table of all ladders' cells."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from flashladder.common import catalog
from flashladder.common.escape import Markdown, markdown
from flashladder.common.records import cell_results
from flashladder.common.records.cell_results import CellResult
from flashladder.common.report import cell_tables, formats
from flashladder.common.report.pages.cell_page import MARKER, Logged, gpu_title
from flashladder.common.report.sections import Section
from flashladder.common.report.tables import numbers
from flashladder.common.report.templating import render


def sections(readme: Path, folder: Path, logged: Logged) -> list[Section]:
    """The table, where the README has a place for it and cells were logged."""
    section = Section(readme, MARKER, partial(_text, readme, folder, logged))
    return [section] if logged and section.has_place else []


def _text(readme: Path, folder: Path, logged: Logged) -> str:
    columns = ["you call", *numbers("cells", "mean", "least"), "where", "by group", "on"]
    named = ((_linked(readme, folder, ladder), ladder) for ladder in catalog.ladders() if ladder in logged)
    rows = [[name, *row] for name, ladder in named for row in _row(ladder, logged[ladder])]
    return render("cell_overview.md.j2", columns=columns, rows=rows)


def _linked(readme: Path, folder: Path, ladder: str) -> Markdown:
    """What is called, with a link to the ladder's page where it has one."""
    called = Markdown(catalog.ladder_named(ladder).called or markdown(ladder))
    page = folder / f"{ladder}.md"
    return Markdown(f"[{called}]({Path(os.path.relpath(page, readme.parent)).as_posix()})") if page.exists() else called


def _row(ladder: str, of_gpus: Mapping[str, pd.DataFrame]) -> Iterator[Sequence[object]]:
    """Of the GPU with most cells; no row where official kernels were timed on none."""
    timed = {gpu: [cell for cell in cell_results.results(rows) if cell.ratio()] for gpu, rows in of_gpus.items()}
    gpu = max(timed, key=lambda gpu: len(timed[gpu]))
    if found := cell_results.ratios(timed[gpu]):
        worst = found.worst
        where = f"{worst.group}, {worst.case}, {worst.mask}, {worst.size}"
        figures = (str(found.count), formats.bold(formats.ratio(found.mean)), formats.ratio(found.least))
        yield *figures, where, _groups(ladder, timed[gpu]), f"{gpu_title(gpu)}, {_days(of_gpus[gpu])}"


def _groups(ladder: str, cells: Sequence[CellResult]) -> str:
    """Each group's mean, and in brackets its least; in the order in which the ladder declares them."""
    groups = cell_tables.by_group(cells)
    declared = [name for name in catalog.ladder_named(ladder).cells if name in groups]
    found = ((name, cell_results.ratios(groups[name])) for name in dict.fromkeys([*declared, *groups]))
    return ", ".join(f"{name} {formats.ratio(each.mean)} ({formats.ratio(each.least)})" for name, each in found if each)


def _days(rows: pd.DataFrame) -> str:
    """The first and the last."""
    days = rows["time"].str[:10]
    return " to ".join(dict.fromkeys((days.min(), days.max())))
