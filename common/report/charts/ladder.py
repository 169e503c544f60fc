"""The pictures of what was measured on a GPU: each takes a data frame and gives a matplotlib figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flashladder.common import catalog
from flashladder.common.records import ladders
from flashladder.common.records.ladder_runs import FIELD
from flashladder.common.report import formats
from flashladder.common.report.charts.theme import colour, figure, pixels, tip

WIDTH = 860
ROW = 26  # pixels of a rung's line
LABELS = 260  # pixels of the rungs' names, left of a picture
LEAST_RATIO = 0.7  # where the scale of ratios begins; at its edge an arrow and a figure stand for a rung below
LINE = 0.45  # of a row: what is at the edge of a rung that is below in both configurations
KINDS = {"own": "its own configuration", "fixed": "one configuration for all"}
FIELD_LINES = {
    "cudnn": "--",
    "fa3": "-.",
    "fa4": (0, (6, 1.5)),
    "triton": ":",
    "cute": (0, (1, 1)),
}  # each has a colour of its name
PIPES = {
    "tensor": "tensor cores",
    "lsu": "loads and stores",
    "fma": "FP32",
    "alu": "integers and logic",
    "mufu": "exponentials",
    "other": "the rest",
}


@figure
def ladder(summary: pd.DataFrame) -> Figure:
    """Every rung's rate and its ratio to official FlashAttention-2, of one GPU and dtype (of `ladders.summary`); the
    field beside the ladder as lines."""
    lines, field = summary[summary["kind"] != FIELD], ladders.field(summary)
    rungs = list(lines["version"].unique())
    height, above = ROW * len(rungs) + 114, 84
    drawn = pixels(WIDTH, height)
    rates = _panel(drawn, LABELS, 215, height, above)
    ratios = _panel(drawn, LABELS + 215 + 26, WIDTH - LABELS - 215 - 26 - 96, height, above)
    _name_rungs(rates, lines.drop_duplicates("version"))
    _draw_rates(rates, summary, rungs)
    _draw_ratios(ratios, lines, rungs, field["ratio"].max())
    handles = [ratios.plot([], [], color=colour(kind), **_marker(kind), label=text)[0] for kind, text in KINDS.items()]
    handles.append(ratios.plot([], [], color=colour("official"), label="FlashAttention-2")[0])
    handles += [_draw_field(rates, ratios, row) for row in field.itertuples()]
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, 1), "borderaxespad": 0}
    drawn.legend(handles=handles, ncols=4, handlelength=1.6, columnspacing=1.6, **place)
    return drawn


def _draw_rates(axes: Axes, summary: pd.DataFrame, rungs: list[str]) -> None:
    axes.set_title(summary["unit"].iloc[0])
    axes.grid(axis="y", visible=False)
    for row in summary[summary["kind"] != FIELD].itertuples():
        y = rungs.index(row.version)
        if row.kind == "own":
            tip(axes.barh(y, row.rate, height=0.56, color=colour("own"), alpha=0.85)[0], _words(row))
        else:
            tip(axes.plot(row.rate, y, color=colour("fixed"), **_marker("fixed"))[0], _words(row))
    lowest, highest = summary["official_rate"].min(), summary["official_rate"].max()
    if summary["run"].nunique() > 1:  # each run has its own
        axes.axvspan(lowest, highest, color=colour("official"), alpha=0.25)
    else:
        axes.axvline(summary["official_rate"].median(), color=colour("official"))
    axes.set_xlim(0, max(summary["rate"].max(), highest) * 1.04)


def _draw_field(rates: Axes, ratios: Axes, row: Any) -> Line2D:
    """A kernel beside the ladder, as a line in both panels; gives its handle in the legend."""
    look: dict[str, Any] = {"color": colour(row.version if row.version in FIELD_LINES else "other")}
    look |= {"linestyle": FIELD_LINES.get(row.version, "-"), "linewidth": 1.6}
    words = f"{row.title}\n{_speed(row)}"
    tip(rates.axvline(row.rate, zorder=3, **look), words)
    tip(ratios.axvline(row.ratio, zorder=1, **look), words)
    return ratios.plot([], [], label=f"{row.title}, {row.ratio:.2f}", **look)[0]


def _draw_ratios(axes: Axes, summary: pd.DataFrame, rungs: list[str], beside: float) -> None:
    axes.set_title("time of FlashAttention-2 / time of the rung")
    axes.set(yticks=range(len(rungs)), yticklabels=[], ylim=(len(rungs) - 0.5, -0.5))
    highest = np.nanmax([1.05, summary["ratio_high"].max() + 0.02, beside + 0.04])
    axes.set_xlim(LEAST_RATIO, highest)
    axes.axvline(1, color=colour("official"))
    for row in summary.sort_values("kind").itertuples():
        y, paint = rungs.index(row.version), colour(row.kind)
        if row.ratio >= LEAST_RATIO:
            axes.plot([row.ratio_low, row.ratio_high], [y, y], color=paint, linewidth=3, solid_capstyle="butt")
            tip(axes.plot(row.ratio, y, color=paint, **_marker(row.kind))[0], _words(row))
        column = {"own": 44, "fixed": 92}[row.kind]
        place: dict[str, Any] = {"xy": (1, y), "xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate(f"{row.ratio:.3f}", xytext=(column, 0), color=paint, ha="right", va="center", **place)
    for version, below in summary[summary["ratio"] < LEAST_RATIO].groupby("version"):
        for line, row in enumerate(below.sort_values("kind", ascending=False).itertuples()):
            _point_below(axes, rungs.index(version) + LINE * (line - (len(below) - 1) / 2), row)


def _point_below(axes: Axes, y: float, row: Any) -> None:
    """An arrow to the left edge, with the ratio that lies beyond it."""
    paint = colour(row.kind)
    place: dict[str, Any] = {"xy": (0, y), "xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    arrow = {"arrowstyle": "-|>", "color": paint, "shrinkA": 0, "shrinkB": 0}
    look: dict[str, Any] = {"color": paint, "fontsize": 10, "va": "center", "arrowprops": arrow}
    tip(axes.annotate(f"{row.ratio:.3f}", xytext=(16, 0), **place, **look), _words(row))


def _panel(drawn: Figure, left: float, width: float, height: float, above: float = 64) -> Axes:
    """Axes with a line for each rung, this far from the left, under the legend."""
    below = 30
    return drawn.add_axes((left / WIDTH, below / height, width / WIDTH, (height - above - below) / height))


def _name_rungs(axes: Axes, rungs: pd.DataFrame) -> None:
    """A line for each rung, the lowest on top, with its name at the left edge of the picture."""
    axes.set(yticks=range(len(rungs)), yticklabels=[], ylim=(len(rungs) - 0.5, -0.5))
    for y, row in enumerate(rungs.itertuples()):
        place: dict[str, Any] = {
            "xy": (0, y),
            "xycoords": ("axes fraction", "data"),
            "textcoords": "offset points",
            "va": "center",
        }
        axes.annotate(row.rung, xytext=(-LABELS, 0), color=colour("muted"), **place)
        axes.annotate(row.title, xytext=(28 - LABELS, 0), **place)


def _marker(kind: str) -> dict[str, Any]:
    if kind == "own":
        return {"marker": "o", "markersize": 8, "linestyle": "none"}
    return {
        "marker": "D",
        "markersize": 6,
        "linestyle": "none",
        "markerfacecolor": colour("surface"),
        "markeredgewidth": 1.6,
    }


def _words(row: Any) -> str:
    return f"{row.rung} {row.title}, {KINDS[row.kind]}\n{_speed(row)}\n{row.config}"


def _speed(row: Any) -> str:
    interval = f"{row.ratio:.3f} [{row.ratio_low:.3f}, {row.ratio_high:.3f}]"
    return f"{formats.mean_rate(row.rate, row.unit)} {row.unit}, ratio {interval}"


@figure
def mix(table: pd.DataFrame, titles: Mapping[str, str], product: str) -> Figure:
    """What a warp issues for each product in the main loop, by pipe (of `data.mixes`): the rest is overhead."""
    height = ROW * len(table) + 94
    drawn = pixels(WIDTH, height)
    axes = _panel(drawn, LABELS, WIDTH - LABELS - 50, height)
    rungs = pd.DataFrame(
        {
            "rung": [catalog.address_of(name) for name in table.index],
            "title": [titles.get(name, name) for name in table.index],
        }
    )
    _name_rungs(axes, rungs)
    pipes = [pipe for pipe in PIPES if pipe in table]
    left = np.zeros(len(table))
    for pipe in pipes:
        bars = axes.barh(range(len(table)), table[pipe], left=left, height=0.6, color=colour(pipe), label=PIPES[pipe])
        for bar, version, count in zip(bars, table.index, table[pipe], strict=True):
            tip(bar, f"{version}: {count:.2f} instructions for {PIPES[pipe]}, for each {product}")
        left += table[pipe].to_numpy()
    for y, total in enumerate(left):
        axes.annotate(
            f"{total:.2f}", (total, y), (6, 0), textcoords="offset points", va="center", color=colour("muted")
        )
    drawn.legend(loc="upper left", ncols=len(pipes), bbox_to_anchor=(0, 1), borderaxespad=0, handlelength=0.8)
    axes.grid(axis="y", visible=False)
    axes.set_title(f"warp instructions of the loop for each {product}")
    return drawn


@figure
def tuning(trials: pd.DataFrame) -> Figure:
    """A study's trials in order: the ratio of each, the best so far, the winner, and at the edge those that failed."""
    drawn = pixels(WIDTH, 300)
    axes = drawn.add_axes((0.06, 0.16, 0.92, 0.73))
    edge = trials["ratio"].min()
    for row in trials.itertuples():
        measured = row.ratio == row.ratio
        words = f"{row.ratio:.3f}" if measured else f"{row.verdict}: {row.reason}"
        paint = colour("good" if row.winner is True else "other" if measured else "bad")
        look: dict[str, Any] = {"marker": "o" if measured else "x", "markersize": 9 if row.winner is True else 5}
        label = "winner" if row.winner is True else None
        y = row.ratio if measured else edge
        (point,) = axes.plot(row.trial, y, color=paint, linestyle="none", label=label, **look)
        tip(point, f"trial {row.trial}: {words}\n{row.config}")
    best = trials["ratio"].cummax().ffill()
    axes.step(trials["trial"], best, where="post", color=colour("own"), zorder=1, label="best so far")
    axes.axhline(1, color=colour("official"), zorder=0, label="FlashAttention-2")
    axes.set(xlabel="trial", ylabel="ratio")
    drawn.legend(loc="upper left", ncols=3, bbox_to_anchor=(0, 1), borderaxespad=0)
    return drawn
