"""Rates over arithmetic intensity, under the roofs of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from flashladder.common.records.ladder_runs import FIELD
from flashladder.common.records.ladders import Limits, field_titles
from flashladder.common.report.charts.ladder import FIELD_LINES
from flashladder.common.report.charts.theme import PALETTE, colour, figure, pixels, tip

WIDTH, HEIGHT = 860, 460
LINE = 16  # pixels that a label needs
FAR = 0.5  # a curve below so much of FlashAttention-2's would press the others together
LOOKS = (  # of the milestones, the lowest first: colours of the palette, dashes and markers
    ("lsu", (0, (1, 1.2)), "s"),
    ("alu", (0, (4, 1.5)), "^"),
    ("fma", (0, (6, 1.5, 1, 1.5)), "D"),
    ("mufu", (0, (2, 1)), "v"),
    ("cute", (0, (8, 2)), "P"),
    ("tensor", (0, (3, 1, 1, 1, 1, 1)), "X"),
    ("fixed", (0, (5, 1)), "p"),
    ("bad", (0, (1, 2)), "h"),
)
STEP = 1.1  # a rung is a milestone when it is so much faster than all below it


@dataclass(frozen=True)
class Curve:
    """A kernel's rates, and how they are drawn."""

    name: str
    role: str  # of its colour
    dashes: Any
    marker: str
    rows: pd.DataFrame


@figure
def roofline(ladder: pd.DataFrame, limits: Limits) -> Figure:
    """The milestones of the ladder, in their own configuration, and the field beside it (rows of one GPU and dtype).

    The intensity is FLOP for each byte of Q, K, V and O, each moved once; it grows with the sequence length. Each curve
    has a colour, dashes and a marker of its own; those far below FlashAttention-2's are left out.
    """
    own = ladder[ladder["kind"] == "own"].assign(intensity=_intensity)
    shown = [version for version in milestones(own) if own[own["version"] == version]["ratio"].mean() > FAR]
    shown = shown or milestones(own)[-1:]
    drawn = pixels(WIDTH, HEIGHT)
    axes = drawn.add_axes((0.07, 0.12, 0.65, 0.86))
    axes.set(xscale="log", yscale="log", xlabel="FLOP for each byte of Q, K, V and O", ylabel="TFLOP/s")
    axes.set_xlim(own["intensity"].min() / 4, own["intensity"].max() * 1.5)
    axes.set_ylim(own[own["version"].isin(shown)]["tflops"].min() / 1.15, limits.peak * 1.25)
    _draw_roofs(axes, limits)
    best, field = own[own["version"] == shown[-1]], ladder[ladder["kind"] == FIELD].assign(intensity=_intensity)
    curves: list[Curve] = [
        Curve(version.replace("_", " "), role, dashes, marker, own[own["version"] == version])
        for version, (role, dashes, marker) in zip(shown[:-1], cycle(LOOKS), strict=False)
    ]
    official = best.assign(tflops=best["tflops"] / best["ratio"])
    curves.append(Curve("FlashAttention-2", "official", "-", "o", official))
    titles = field_titles()
    for name, rows in field.groupby("version", sort=False):
        role = str(name) if name in PALETTE else "other"
        curves.append(Curve(titles.get(str(name), str(name)), role, FIELD_LINES.get(str(name), "-"), "*", rows))
    curves.append(Curve(shown[-1].replace("_", " "), "own", "-", "o", best))
    for curve in curves:
        _draw_curve(axes, curve)
    _name_curves(axes, curves)
    axes.yaxis.set_major_locator(FixedLocator([10, 20, 50, 100, 200, 300, 400, 500, 600, 800, 1000, 2000]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    return drawn


def milestones(own: pd.DataFrame) -> list[str]:
    """The rungs worth a curve, each much faster than all below it, the fastest last; by their ratios, which the GPU's
    clock, another in every run, does not touch."""
    ratios = own.groupby("version")["ratio"].mean().sort_index()
    shown: list[str] = []
    for version, ratio in ratios.items():
        if not shown or ratio > STEP * ratios[shown[-1]]:
            shown.append(str(version))
    fastest = str(ratios.idxmax())
    return [version for version in shown if version != fastest] + [fastest]


def _intensity(rows: pd.DataFrame) -> pd.Series[float]:
    """FLOP for each byte that must move: 4 S² d of the products, 8 S d bytes of 16-bit Q, K, V and O."""
    return rows["seqlen_q"] * rows["seqlen_k"] / (rows["seqlen_q"] + rows["seqlen_k"])


def _draw_roofs(axes: Axes, limits: Limits) -> None:
    left, right = axes.get_xlim()
    slope = limits.bandwidth / 1e3  # TFLOP/s for each FLOP/byte
    paint = colour("muted")
    ceilings = {"dense peak": limits.peak}
    if limits.mma_sync and limits.mma_sync < limits.peak:
        ceilings["mma.sync"] = limits.mma_sync
    for name, rate in ceilings.items():
        axes.plot([rate / slope, right], [rate, rate], color=paint)
        axes.annotate(f"{name}, {rate:.0f}", (rate / slope, rate), (8, 5), textcoords="offset points", color=paint)
    axes.plot([left, limits.peak / slope], [left * slope, limits.peak], color=paint)
    begin, end = axes.transData.transform([(left, left * slope), (10 * left, 10 * left * slope)])
    angle = float(np.degrees(np.arctan2(*(end - begin)[::-1])))
    text, place = f"memory, {limits.bandwidth:,.0f} GB/s", (left, max(left * slope, axes.get_ylim()[0]))
    axes.annotate(text, place, (16, 4), textcoords="offset points", rotation=angle, rotation_mode="anchor", color=paint)


def _draw_curve(axes: Axes, curve: Curve) -> None:
    axes.plot(curve.rows["intensity"], curve.rows["tflops"], color=colour(curve.role), linestyle=curve.dashes)
    for row in curve.rows.itertuples():
        (point,) = axes.plot(row.intensity, row.tflops, curve.marker, color=colour(curve.role), markersize=6)
        tip(point, f"{curve.name}, S = {row.seqlen_q}: {row.tflops:.0f} TFLOP/s")


def _name_curves(axes: Axes, curves: Sequence[Curve]) -> None:
    """Names right of where the curves end, pushed down where they would touch."""
    bottom, top = axes.get_ylim()
    height = axes.get_position().height * HEIGHT
    pixels_of = {
        curve.name: height * np.log(curve.rows["tflops"].iloc[-1] / bottom) / np.log(top / bottom) for curve in curves
    }
    place = np.inf
    for curve in sorted(curves, key=lambda each: -pixels_of[each.name]):
        place = min(pixels_of[curve.name], place - LINE)
        where: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "center"}
        paint = colour(curve.role if curve.role != "other" else "muted")
        axes.annotate(curve.name, (1, 0), (28, place), color=paint, **where)
        look: dict[str, Any] = {"color": paint, "linestyle": curve.dashes, "marker": curve.marker, "markersize": 5}
        y = place / height
        axes.plot(
            [1.012, 1.034], [y, y], transform=axes.transAxes, clip_on=False, markevery=[0], label=curve.name, **look
        )
