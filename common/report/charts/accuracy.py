"""The picture of accuracy: errors on each family of inputs beside FlashAttention-2's, of one dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flashladder.common.problem.families import FAMILIES
from flashladder.common.problem.problem import DTYPES
from flashladder.common.report import accuracy
from flashladder.common.report.charts.theme import colour, figure, pixels
from flashladder.common.studies.accuracy.study import MISSED, YARDSTICK

WIDTH, ROW = 860, 24
ABOVE, BELOW = 70, 26  # pixels for the legend and the titles, and for the scales
PANELS = {"rms": (150, 330), "mean": (510, 336)}  # where each begins, and how wide it is
TITLES = {"rms": "RMS error of O / the yardstick's", "mean": "mean error of O, in half units of its last place"}
LIMITS = {"rms": (0.5, 1.9), "mean": (-0.75, 0.75)}  # errors beyond lie at the edge
REFERENCE = {"rms": 1.0, "mean": 0.0}
OTHERS = {"fa2": "official", "cudnn": "fixed", "fa3": "fa3", "plain": "official"}  # colours of other people's kernels
OURS, THEIRS = 0.2, -0.2  # of a line's height: rungs lie below its middle, the others above
LEAST = 2.0**-14  # of a unit of the last place: smaller errors are as good as none


@figure
def errors(rows: pd.DataFrame) -> Figure:
    """A line a family, of the number of keys at which a kernel is nearest to its bars, or farthest beyond (rows of
    `accuracy.latest`).

    All rungs are one bar from the least error to the largest, with a dot for the newest and crosses for those beyond a
    bar. Points of other people's kernels stand above it.
    """
    judged = _judged(rows)
    families = [name for name in FAMILIES if name in set(judged["family"])]
    height = ROW * len(families) + ABOVE + BELOW
    drawn = pixels(WIDTH, height)
    for column, (left, width) in PANELS.items():
        place = (left / WIDTH, BELOW / height, width / WIDTH, 1 - (ABOVE + BELOW) / height)
        axes = drawn.add_axes(place)
        axes.set(yticks=range(len(families)), ylim=(len(families) - 0.5, -0.5), title=TITLES[column])
        axes.set_yticklabels(families if column == "rms" else [""] * len(families))
        axes.set_xlim(*LIMITS[column])
        axes.axvline(REFERENCE[column], color=colour("muted"), linewidth=1)
        for y, family in enumerate(families):
            _draw(axes, column, y, judged[judged["family"] == family])
    drawn.legend(handles=[*_legend(judged)], loc="upper left", ncols=4, bbox_to_anchor=(0, 1), borderaxespad=0)
    return drawn


def _judged(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each kernel and family, with its errors in the units of the picture."""
    errors_of = rows[rows["has"] == accuracy.ERRORS]
    ulp = torch.finfo(DTYPES[rows["dtype"].iloc[0]]).eps
    same = ["family", "seqlen_k"]
    yardsticks = errors_of[errors_of["verdict"] == YARDSTICK]
    yardstick = yardsticks.drop_duplicates(same, keep="last").set_index(same)["rms_error"]  # each device has its own
    beside = yardstick.reindex(pd.MultiIndex.from_frame(errors_of[same])).to_numpy()
    floor = LEAST * ulp
    units = {
        "rms": errors_of["rms_error"].clip(lower=floor) / pd.Series(beside, errors_of.index).clip(lower=floor),
        "mean": errors_of["mean_error"] / (ulp / 2),
    }
    judged = errors_of.assign(**units, is_ours=~errors_of["version"].isin([*OTHERS]))
    return judged.sort_values("strain").drop_duplicates(["version", "family"], keep="last")


def _draw(axes: Axes, column: str, y: int, rows: pd.DataFrame) -> None:
    """The line of one family."""
    shown = rows.assign(x=rows[column].clip(*LIMITS[column])).dropna(subset=["x"])
    ours, others = shown[shown["is_ours"]], shown[~shown["is_ours"]]
    met = ours[ours["verdict"] != MISSED]
    if len(met):
        axes.plot([met["x"].min(), met["x"].max()], [y + OURS] * 2, **_look("range"))
    if len(ours):
        newest = ours.loc[ours["version"].idxmax()]
        axes.plot(newest["x"], y + OURS, **_look("newest"))
    beyond = ours[ours["verdict"] == MISSED]
    axes.plot(beyond["x"], [y + OURS] * len(beyond), **_look("beyond"))
    for row in others.itertuples():
        axes.plot(row.x, y + THEIRS, **_look(row.version))


def _look(what: str) -> dict[str, Any]:
    """How a kernel, or a group of them, is drawn."""
    if what == "range":
        return {"color": colour("own"), "alpha": 0.35, "linewidth": 7, "solid_capstyle": "round", "clip_on": False}
    marker, size, role = {"newest": ("o", 6, "own"), "beyond": ("x", 7, "bad")}.get(
        what, ("D", 5, OTHERS.get(what, ""))
    )
    look: dict[str, Any] = {"marker": marker, "markersize": size, "linestyle": "none", "clip_on": False}
    return look | {"color": colour(role), "alpha": 0.9}


def _legend(judged: pd.DataFrame) -> Iterator[Line2D]:
    """Each of other people's kernels, all of ours, the newest, and where there are any, ours that miss a bar."""
    ours = judged[judged["is_ours"]]
    for version in judged[~judged["is_ours"]]["version"].unique():
        yield Line2D([], [], label=accuracy.title(str(version)), **_look(str(version)))
    if len(ours):
        yield Line2D([], [], label="all rungs", **_look("range"))
        yield Line2D([], [], label=f"rung {accuracy.title(ours['version'].max())}", **_look("newest"))
    if ours["verdict"].eq(MISSED).any():
        yield Line2D([], [], label="ours, beyond a bar", **_look("beyond"))
