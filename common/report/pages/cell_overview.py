"""What you call, and what it gives beside official kernels: the README's tables of all ladders' cells.

One has each official kernel in the cells of a ladder's first group, the other the fastest one in the cells of all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from flashladder.common import catalog
from flashladder.common.escape import Markdown, markdown
from flashladder.common.measure import baselines
from flashladder.common.records import cell_results
from flashladder.common.records.cell_results import CellResult
from flashladder.common.report import cell_tables, formats
from flashladder.common.report.pages.cell_page import MARKER, Logged, gpu_title
from flashladder.common.report.sections import Section
from flashladder.common.report.tables import numbers
from flashladder.common.report.templating import render

CALLS = "calls"  # the place of the table of each official kernel


def sections(readme: Path, folder: Path, logged: Logged) -> list[Section]:
    """The tables, where the README has a place for them and cells were logged."""
    made = [Section(readme, name, partial(text, readme, folder, logged)) for name, text in _TEXTS.items()]
    return [section for section in made if logged and section.has_place]


def _calls(readme: Path, folder: Path, logged: Logged) -> str:
    first = {ladder: _first_group(ladder, logged[ladder]) for ladder in catalog.ladders() if ladder in logged}
    official = [
        name for name in baselines.titles() if any(name in cell.times for cells in first.values() for cell in cells)
    ]
    titles = (cell_tables.title_of(name).removesuffix(" (torch)") for name in official)  # narrow: it is a first screen
    columns = ["you call", "it runs", *numbers(*titles)]
    rows = []
    for ladder, cells in first.items():
        rungs = sorted({cell_tables.title_of(cell.rung).removeprefix("rung ") for cell in cells if cell.rung})
        figures = (cell_results.beside(cells, name) for name in official)
        of_each = ["" if figure is None else formats.ratio(figure) for figure in figures]
        rows.append([_linked(readme, folder, ladder), ", ".join(rungs), *of_each])
    return render("cell_calls.md.j2", columns=columns, rows=rows)


def _first_group(ladder: str, of_gpus: Mapping[str, pd.DataFrame]) -> list[CellResult]:
    """Its cells on the GPU that has most of them."""
    group = next(iter(catalog.ladder_named(ladder).cells))
    found = [[cell for cell in cell_results.results(rows) if cell.group == group] for rows in of_gpus.values()]
    return max(found, key=len)


def _overview(readme: Path, folder: Path, logged: Logged) -> str:
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


_TEXTS = {CALLS: _calls, MARKER: _overview}
