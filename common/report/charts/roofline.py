"""Rates over arithmetic intensity, under the roofs of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from flashladder.common.records.ladder_runs import FIELD
from flashladder.common.records.ladders import Limits, field_titles
from flashladder.common.report.charts.theme import PALETTE, colour, figure, pixels, tip

WIDTH, HEIGHT = 860, 430
LINE = 16  # pixels that a label needs
STEP = 1.1  # a rung is a milestone when it is so much faster than all below it


@figure
def roofline(ladder: pd.DataFrame, limits: Limits) -> Figure:
    """The milestones of the ladder, in their own configuration, and the field beside it (rows of one GPU and dtype).

    The intensity is FLOP for each byte of Q, K, V and O, each moved once; it grows with the sequence length.
    """
    own = ladder[ladder["kind"] == "own"].assign(intensity=_intensity)
    shown = milestones(own)
    drawn = pixels(WIDTH, HEIGHT)
    axes = drawn.add_axes((0.07, 0.13, 0.72, 0.85))
    axes.set(xscale="log", yscale="log", xlabel="FLOP for each byte of Q, K, V and O", ylabel="TFLOP/s")
    axes.set_xlim(own["intensity"].min() / 4, own["intensity"].max() * 1.5)
    axes.set_ylim(own[own["version"].isin(shown)]["tflops"].min() / 1.6, limits.peak * 1.5)
    _draw_roofs(axes, limits)
    best, field = own[own["version"] == shown[-1]], ladder[ladder["kind"] == FIELD].assign(intensity=_intensity)
    curves = [(version.replace("_", " "), "other", own[own["version"] == version]) for version in shown[:-1]]
    curves.append(("FlashAttention-2", "official", best.assign(tflops=best["tflops"] / best["ratio"])))
    titles = field_titles()
    for name, rows in field.groupby("version", sort=False):
        curves.append((titles.get(str(name), str(name)), str(name) if name in PALETTE else "other", rows))
    curves.append((shown[-1].replace("_", " "), "own", best))
    for name, role, rows in curves:
        _draw_curve(axes, name, role, rows)
    _name_curves(axes, curves)
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
        axes.annotate(
            f"{name}, {rate:.0f}", (right, rate), (-4, 5), textcoords="offset points", ha="right", color=paint
        )
    axes.plot([left, limits.peak / slope], [left * slope, limits.peak], color=paint)
    begin, end = axes.transData.transform([(left, left * slope), (10 * left, 10 * left * slope)])
    angle = float(np.degrees(np.arctan2(*(end - begin)[::-1])))
    text, place = f"memory, {limits.bandwidth:,.0f} GB/s", (left, max(left * slope, axes.get_ylim()[0]))
    axes.annotate(text, place, (6, 14), textcoords="offset points", rotation=angle, rotation_mode="anchor", color=paint)


def _draw_curve(axes: Axes, name: str, role: str, rows: pd.DataFrame) -> None:
    axes.plot(rows["intensity"], rows["tflops"], color=colour(role))
    for row in rows.itertuples():
        (point,) = axes.plot(row.intensity, row.tflops, "o", color=colour(role), markersize=6)
        tip(point, f"{name}, S = {row.seqlen_q}: {row.tflops:.0f} TFLOP/s")


def _name_curves(axes: Axes, curves: Sequence[tuple[str, str, pd.DataFrame]]) -> None:
    """Names right of where the curves end, pushed down where they would touch."""
    bottom, top = axes.get_ylim()
    height = axes.get_position().height * HEIGHT
    pixels_of = {
        name: height * np.log(rows["tflops"].iloc[-1] / bottom) / np.log(top / bottom) for name, _, rows in curves
    }
    place = np.inf
    for name, role, _ in sorted(curves, key=lambda curve: -pixels_of[curve[0]]):
        place = min(pixels_of[name], place - LINE)
        where: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
        axes.annotate(
            name, (1, 0), (6, place), va="center", color=colour(role if role != "other" else "muted"), **where
        )
