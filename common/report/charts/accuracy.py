"""The picture of accuracy: each kernel's errors on each family, of one dtype (rows of `accuracy.latest`)."""

from __future__ import annotations

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
from flashladder.common.studies.accuracy.study import MISSED

WIDTH, ROW = 860, 22
ABOVE, BELOW = 84, 34  # pixels for the legend and the titles, and for the scales
PANELS = {"rms_error": (150, 330), "mean_error": (510, 336)}  # where each begins, and how wide it is
TITLES = {"rms_error": "RMS error of O", "mean_error": "mean error of O: above zero, O is too large"}
ROLES = {"fa2": "official", "plain": "official", "cudnn": "fixed", "fa3": "mufu"}  # all others are ours
HALF: dict[str, Any] = {"color": colour("muted"), "linewidth": 1, "linestyle": (0, (2, 3))}
SPREAD = 0.5  # of a line's height, over which kernels lie side by side
FINEST = 2.0**-10  # of half a unit in the last place: smaller errors lie at the edge, or as good as at zero


@figure
def errors(rows: pd.DataFrame) -> Figure:
    """A line a family; of each kernel the number of keys at which it is nearest to its bars, or farthest beyond."""
    judged = (
        rows[rows["has"] == accuracy.ERRORS].sort_values("strain").drop_duplicates(["version", "family"], keep="last")
    )
    families = [name for name in FAMILIES if name in set(judged["family"])]
    height = ROW * len(families) + ABOVE + BELOW
    drawn = pixels(WIDTH, height)
    half_ulp = torch.finfo(DTYPES[rows["dtype"].iloc[0]]).eps / 2
    for column, (left, width) in PANELS.items():
        place = (left / WIDTH, BELOW / height, width / WIDTH, 1 - (ABOVE + BELOW) / height)
        axes = drawn.add_axes(place)
        names = families if column == "rms_error" else []
        axes.set(yticks=range(len(families)), ylim=(len(families) - 0.5, -0.5), title=TITLES[column])
        axes.set_yticklabels(names or [""] * len(families))
        _scale(axes, column, half_ulp)
        _draw(axes, column, judged, families)
    drawn.legend(handles=_legend(judged), loc="upper left", ncols=4, bbox_to_anchor=(0, 1), borderaxespad=0)
    return drawn


def _scale(axes: Axes, column: str, half_ulp: float) -> None:
    """Decades, to 1, which is an output of zero; between the first of both signs a straight line."""
    if column == "rms_error":
        axes.set(xscale="log", xlim=(FINEST * half_ulp, 2))
    else:
        axes.set_xscale("symlog", linthresh=half_ulp / 16, linscale=0.5)
        axes.set_xlim(-2, 2)
        axes.axvline(0, color=colour("muted"), linewidth=1)
        axes.set_xticks([-1, -0.01, 0, 0.01, 1])
    for edge in (half_ulp,) if column == "rms_error" else (-half_ulp, half_ulp):
        axes.axvline(edge, **HALF)


def _draw(axes: Axes, column: str, judged: pd.DataFrame, families: list[str]) -> None:
    """A kernel's points, in its own place between the families' lines."""
    versions = list(dict.fromkeys(kernel.version for kernel in accuracy.kernels(judged)))
    for (version, verdict), rows in judged.groupby(["version", "verdict"]):
        shift = SPREAD * (versions.index(version) / max(1, len(versions) - 1) - 0.5)
        y = [families.index(name) + shift for name in rows["family"]]
        axes.plot(rows[column].clip(*axes.get_xlim()), y, **_marker(version, verdict == MISSED))


def _marker(version: str, is_missed: bool = False) -> dict[str, Any]:
    """Ours that miss a bar are crosses; of other people's kernels a bar is no matter."""
    is_ours = version not in ROLES
    paint = colour("bad" if is_ours and is_missed else ROLES.get(version, "own"))
    shape = "x" if is_ours and is_missed else "o" if is_ours else "D"
    return {"marker": shape, "markersize": 4.5, "linestyle": "none", "color": paint, "alpha": 0.85, "clip_on": False}


def _legend(judged: pd.DataFrame) -> list[Line2D]:
    """Each of other people's kernels, ours, and where there are any, ours that miss a bar."""
    versions = list(judged["version"].unique())
    kinds = {accuracy.title(version): _marker(version) for version in versions if version in ROLES}
    kinds |= {"our rungs": _marker("")}
    if any(row.verdict == MISSED and row.version not in ROLES for row in judged.itertuples()):
        kinds |= {"ours, beyond a bar": _marker("", is_missed=True)}
    half = Line2D(
        [], [], color=colour("muted"), linewidth=1, linestyle=(0, (2, 3)), label="half a unit in O's last place"
    )
    return [*(Line2D([], [], label=name, **marker) for name, marker in kinds.items()), half]
