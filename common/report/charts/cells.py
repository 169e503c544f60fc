"""Cells beside official kernels as a picture: the ratio of the fastest rung in each, a line for each case and mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flashladder.common.records import cell_results
from flashladder.common.records.cell_results import CellResult
from flashladder.common.report.charts.theme import colour, figure, pixels, tip

WIDTH = 860
ROW = 22  # pixels of a line
LABELS, MEANS = 290, 70  # pixels left and right of the panel
ABOVE, BELOW = 60, 30

Rows = Sequence[tuple[str, Sequence[CellResult]]]


@figure
def ratios(groups: Mapping[str, Rows], titles: Mapping[str, str]) -> Figure:
    """Of each group a heading with its mean, then a line of dots for each row; kernels have titles."""
    lines = sum(1 + len(rows) for rows in groups.values())
    height = ROW * lines + ABOVE + BELOW
    drawn = pixels(WIDTH, height)
    panel = (LABELS / WIDTH, BELOW / height, (WIDTH - LABELS - MEANS) / WIDTH, ROW * lines / height)
    axes = drawn.add_axes(panel)
    axes.set_title("time of the fastest official kernel / time of the fastest rung")
    axes.annotate("mean", (1, 1), (MEANS - 8, 10), xycoords="axes fraction", textcoords="offset points", ha="right")
    axes.set(yticks=[], ylim=(lines - 0.5, -0.5))
    axes.axvline(1, color=colour("official"))
    y = 0
    for group, rows in groups.items():
        _write(axes, y, group, [cell for _, cells in rows for cell in cells], fontweight="bold")
        for number, (label, cells) in enumerate(rows, start=1):
            _write(axes, y + number, label, cells)
            _draw(axes, y + number, cells, titles)
        y += 1 + len(rows)
    return drawn


def _write(axes: Axes, y: int, label: str, cells: Sequence[CellResult], **look: Any) -> None:
    """A label at the left, and the mean of the cells at the right."""
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
    axes.annotate(label, (0, y), (-LABELS if look else 16 - LABELS, 0), **place, **look)
    if found := cell_results.ratios(cells):
        side = colour("good" if found.mean >= 1 else "bad")
        axes.annotate(f"{found.mean:.3f}", (1, y), (MEANS - 8, 0), ha="right", color=side, **place, **look)


def _draw(axes: Axes, y: int, cells: Sequence[CellResult], titles: Mapping[str, str]) -> None:
    found = [(cell, ratio) for cell in cells if (ratio := cell.ratio()) is not None]
    if not found:
        return
    span = [ratio for _, ratio in found]
    axes.plot([min(span), max(span)], [y, y], color=colour("grid"), linewidth=3, solid_capstyle="round", zorder=1)
    for (cell, ratio), size in zip(found, np.linspace(4, 9, len(found)), strict=True):  # longer ones are larger
        dot = axes.plot(ratio, y, "o", color=colour("own"), markersize=size, alpha=0.75)[0]
        rates = [f"{titles[name]} {cell.figures[name]:.0f} {cell.unit}" for name in (cell.official, cell.rung)]
        tip(dot, f"{cell.case}, {cell.mask}, {cell.size}: {ratio:.3f}\n" + "\n".join(rates))
