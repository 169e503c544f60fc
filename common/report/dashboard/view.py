"""What the page shows of one GPU and dtype: the ladder, the heat map, the roofline."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from flashladder.common import catalog
from flashladder.common.problem.problem import COMPUTE
from flashladder.common.records import ladders
from flashladder.common.records.ladder_runs import FIELD, FIXED, OWN, Ladder
from flashladder.common.records.ladders import Limits
from flashladder.common.records.slowdowns import remarks
from flashladder.common.report.charts import theme
from flashladder.common.report.charts.ladder import ladder as ladder_chart
from flashladder.common.report.charts.roofline import roofline
from flashladder.common.report.ladder_tables import fixed_configuration, is_clear, official, on_two_cards

FULL_RATIO = 2.5  # has the strongest colour of the heat map, as 1 / 2.5 has
BEND = 0.6  # of the way there in logarithms, so that ratios near 1 have a colour too
STRONGEST = 55  # per cent of that colour
HEATS = {"own": "its own configuration", "fixed": "one configuration for all"}

Parts = dict[str, Any]


def view(gpu: str, dtype: str, summary: pd.DataFrame, ladder: Ladder) -> Parts:
    """The parts of one view: `summary` has the lines of this GPU and dtype, `ladder` the rows of the GPU."""
    rows = ladder.rows[ladder.rows["dtype"] == dtype]
    limits = Limits.of(gpu)
    own = summary[summary["kind"] == OWN]
    name = f"{gpu}-{dtype}"
    drawn = theme.with_key(ladder_chart(summary), f"ladder-{name}", f"The ladder on {gpu}, {dtype}")
    roofs = theme.with_key(roofline(rows, limits), f"roofline-{name}", f"Roofline of {gpu}") if limits else ""
    return {
        "name": name,
        "label": f"{gpu} {dtype}",
        "gpu_title": limits.title if limits else gpu,
        "lengths": sorted(rows["seqlen_q"].unique()),
        "num_rungs": len(own),
        "best": own.loc[own["ratio"].idxmax()],
        "faster": own[own["ratio_low"] > 1].to_dict("records"),
        "ladder": drawn,
        "conditions": _conditions(rows, ladder) + _gaps(summary),
        "rungs": _rungs(summary),
        "field": [*ladders.field(summary).itertuples()],
        "cards_apart": on_two_cards(summary, ladder, in_full=True) if ladder.again else None,
        "limits": limits if summary["unit"].iloc[0] == COMPUTE else None,
        "official": official(summary),
        "unit": summary["unit"].iloc[0],
        "fixed": fixed_configuration(summary),
        "official_rate": summary["official_rate"].median(),
        "heats": [_heat(_heated(rows, kind), title) for kind, title in HEATS.items() if kind in set(rows["kind"])],
        "roofline": roofs,
    }


def _conditions(rows: pd.DataFrame, ladder: Ladder) -> str:
    """What was measured, on what, and what a reader must know of the GPU."""
    last = rows.iloc[-1]
    shape = f"{last['num_heads']} heads of {last['head_dim']}, batch x S = {last['batch'] * last['seqlen_q']}"
    return f"{shape}, {last['mode']}. {ladder.source}{remarks(rows)}"


def _gaps(summary: pd.DataFrame) -> str:
    fewer = summary[summary["lengths"] < summary["lengths"].max()]
    short = [row.rung or row.title for row in fewer.drop_duplicates("version").itertuples()]
    return f" Not measured at every length, so that their means are of fewer: {', '.join(short)}." if short else ""


def _rungs(summary: pd.DataFrame) -> list[tuple[Any, Any]]:
    """Of each rung the lines of its own configuration and of the fixed one, None where it has no such."""
    groups = summary[summary["kind"] != FIELD].groupby("version", sort=True)
    kinds = ({row.kind: row for row in group.itertuples()} for _, group in groups)
    return [(of_kind[OWN], of_kind.get(FIXED)) for of_kind in kinds]


def direction(row: Any) -> str:
    """Whether a step is up or down, or within the intervals."""
    if row is None or not is_clear(row):
        return "level"
    return "up" if row.step > 1 else "down"


def _heated(rows: pd.DataFrame, kind: str) -> pd.DataFrame:
    """The rows of a heat map: beside the rungs' own configurations stands the field."""
    return rows[rows["kind"].isin([OWN, FIELD] if kind == OWN else [kind])]


def _heat(rows: pd.DataFrame, title: str) -> Parts:
    lengths = sorted(rows["seqlen_q"].unique())
    lines = []
    for version, group in rows.groupby("version", sort=True):
        by_length = {row.seqlen_q: row for row in group.itertuples()}
        cells = [_heat_cell(by_length.get(length)) for length in lengths]
        name = version if group["kind"].iloc[0] == FIELD else catalog.address_of(str(version))
        lines.append({"rung": name, "version": version, "cells": cells})
    return {"title": title, "lengths": lengths, "rows": lines}


def _heat_cell(row: Any) -> Parts:
    if row is None:
        return {"side": "", "strength": 0, "ratio": "", "words": "not measured"}
    strength = min(1.0, abs(np.log(row.ratio)) / np.log(FULL_RATIO)) ** BEND * STRONGEST
    words = f"{row.tflops:.0f} TFLOP/s, {row.ratio:.3f} [{row.ratio_low:.3f}, {row.ratio_high:.3f}], {row.verdict}"
    side = "above" if row.ratio > 1 else "below"
    return {"side": side, "strength": f"{strength:.0f}", "ratio": f"{row.ratio:.2f}", "words": words}
