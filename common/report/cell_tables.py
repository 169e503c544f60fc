"""Cells beside official kernels as tables: a table for each group, and one of all groups' ratios."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from rich.table import Table

from flashladder.common import catalog
from flashladder.common.measure import baselines
from flashladder.common.records import cell_results
from flashladder.common.records.cell_results import FASTEST, CellResult
from flashladder.common.records.schemas import BENCH
from flashladder.common.report import formats
from flashladder.common.report.tables import Rows, numbers, table


@dataclass(frozen=True)
class CellTable:
    """A title, columns and rows, for the terminal or a page."""

    title: str
    columns: Sequence[str]
    rows: Rows


def of_run(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """For the terminal, of a run's rows."""
    cells = cell_results.results(cell_results.latest(pd.DataFrame(rows, columns=[*BENCH.columns])))
    return [table(made.title, made.columns, made.rows) for made in (*of_groups(cells), overview(cells))]


def of_groups(cells: Sequence[CellResult]) -> Iterator[CellTable]:
    """For each group every kernel's figure in each cell, and behind it the ratio."""
    for group, among in by_group(cells).items():
        sizes = _sizes(among)
        rows = [line for _, row in rows_of(among) for line in _lines(row, sizes)]
        title = f"{group}: {among[0].unit}, and the fastest official kernel's time / its own"
        yield CellTable(title, ["case", "mask", "kernel", *numbers(*sizes)], rows)


def overview(cells: Sequence[CellResult]) -> CellTable:
    """For each group the mean and the least ratio of the fastest rung and, of several, of each."""
    rows = []
    for group, among in {**by_group(cells), "all": cells}.items():
        rungs = [name for name in cell_results.kernels(among) if name not in baselines.titles()]
        for kernel in [FASTEST, *rungs] if len(rungs) > 1 else rungs:
            if found := cell_results.ratios(among, kernel):
                where = f"{found.worst.case}, {found.worst.mask}, {found.worst.size}"
                figures = (str(found.count), f"{found.mean:.3f}", f"{found.least:.3f}")
                rows.append((group, title_of(kernel), *figures, where))
    title = "the fastest official kernel's time / the rung's: geometric mean, and the least"
    return CellTable(title, ["group", "kernel", *numbers("cells", "mean", "least"), "where"], rows)


def by_group(cells: Sequence[CellResult]) -> dict[str, list[CellResult]]:
    """In their order."""
    found: dict[str, list[CellResult]] = {}
    for cell in cells:
        found.setdefault(cell.group, []).append(cell)
    return found


def title_of(kernel: str) -> str:
    """A baseline's title, or a rung's address."""
    if kernel == FASTEST:
        return kernel
    return baselines.titles().get(kernel) or f"rung {catalog.address_of(kernel)}"


def _sizes(cells: Sequence[CellResult]) -> list[str]:
    """Lengths in order, or mixes as they come."""
    found = list(dict.fromkeys(cell.size for cell in cells))
    return sorted(found, key=int) if all(size.isdigit() for size in found) else found


def rows_of(cells: Sequence[CellResult]) -> Iterator[tuple[tuple[str, str], list[CellResult]]]:
    """By case and mask the cells of all sizes."""
    found: dict[tuple[str, str], list[CellResult]] = {}
    for cell in cells:
        found.setdefault((cell.case, cell.mask), []).append(cell)
    yield from found.items()


def _lines(row: Sequence[CellResult], sizes: Sequence[str]) -> Iterator[list[str]]:
    """A line for each kernel; the case and the mask stand in the first one."""
    by_size, place = {cell.size: cell for cell in row}, [row[0].case, row[0].mask]
    for kernel in cell_results.kernels(row):
        yield [*place, title_of(kernel), *(_cell(by_size.get(size), kernel) for size in sizes)]
        place = ["", ""]


def _cell(cell: CellResult | None, kernel: str) -> str:
    if cell is None or kernel not in cell.times:
        return ""
    ratio = None if kernel in baselines.titles() else cell.ratio(kernel)
    return formats.mean_rate(cell.figures[kernel], cell.unit) + (f" ({ratio:.2f})" if ratio else "")
