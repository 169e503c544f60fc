"""A chart of a rung's speed, from what was logged: beside the rung below and official kernels, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pandas as pd

from flashladder.common.catalog import Version
from flashladder.common.measure import baselines
from flashladder.common.paths import PUBLISHED
from flashladder.common.records import benches
from flashladder.common.report.pages import steps
from flashladder.common.report.templating import render

Bars = list[tuple[int, list[tuple[str, str, float]]]]  # of each length the rates: a CSS class, whose it is, how much
# What is alike of the lengths of one chart.
_SHAPE = ["gpu", "run", "num_heads", "num_heads_k", "head_dim", "head_dim_v", "causal"]
_OPTIONS = ["window_left", "window_right", "softcap", "options", "mix"]  # none of them is set


def chart(version: Version) -> tuple[str, Callable[[], str]] | None:
    """Its caption and its HTML; None where no run has the rung."""
    found = _of_ladder(version) or _of_bench(version)
    if found is None:
        return None
    words, bars = found
    most = max(rate for _, rates in bars for _, _, rate in rates)
    return words, lambda: str(render("book_speed.html.j2", bars=bars, most=most))


def _of_ladder(version: Version) -> tuple[str, Bars] | None:
    """From the largest run of the first ladder."""
    shown = steps.largest()
    if shown is None:
        return None
    gpu, ladder = shown
    rows = ladder.rows[(ladder.rows["kind"] == "own") & (ladder.rows["dtype"] == "bf16")]
    ours = rows[rows["version"] == version.name]
    if ours.empty:
        return None
    lower = _rates(rows, _below(version))
    bars = []
    for row in ours.sort_values("seqlen_q").itertuples():
        official = row.tflops * row.time_us / row.baseline_us
        beside = [("official", "FlashAttention-2", official)]
        bars.append((int(row.seqlen_q), [*_ours(lower, row), *beside]))
    return _caption(gpu, ours, "each rung in its own configuration"), bars


def _of_bench(version: Version) -> tuple[str, Bars] | None:
    """From what `flashladder bench` logged of its ladder: of its runs over lengths the one with the most of them."""
    logged = _benched(version.ladder)
    if logged.empty or version.name not in set(logged["version"]):
        return None
    shapes = [rows for _, rows in logged.groupby(_SHAPE, dropna=False) if version.name in set(rows["version"])]
    rows = max(shapes, key=lambda shape: _worth(shape[shape["version"] == version.name]))
    ours = rows[rows["version"] == version.name]
    lower = _rates(rows, _below(version))
    bars = [
        (int(row.seqlen_q), [*_ours(lower, row), *_official(rows[rows["seqlen_q"] == row.seqlen_q])])
        for row in ours.sort_values("seqlen_q").itertuples()
    ]
    return _caption(ours["gpu"].iloc[0], ours, f"{ours['num_heads'].iloc[0]} heads"), bars


@cache
def _benched(ladder: str) -> pd.DataFrame:
    """The plain problems of a ladder that were timed one launch behind the other, of all GPUs."""
    of_gpus = benches.read(PUBLISHED, []).get(ladder, {})
    if not of_gpus:
        return pd.DataFrame()
    rows = pd.concat([frame.assign(gpu=gpu) for gpu, frame in of_gpus.items()])
    is_plain = rows[_OPTIONS].isna() | rows[_OPTIONS].isin(["", 0])
    asked = (rows["mode"] == "hot") & (rows["dtype"] == "bf16") & (rows["family"] == "normal")
    return rows[asked & is_plain.all(axis=1) & rows["tflops"].notna()]


def _worth(ours: pd.DataFrame) -> tuple[Any, ...]:
    """By which the run of a chart is chosen: lengths, then what README's tables show, then the latest."""
    first = ours.iloc[0]
    width = first["head_dim"]
    return len(ours), not first["causal"], width == 128, pd.isna(first["head_dim_v"]), str(ours["time"].max())


def _below(version: Version) -> str:
    below = version.below()
    return below.name if below else ""


def _rates(rows: pd.DataFrame, name: str) -> pd.Series[float]:
    return rows[rows["version"] == name].set_index("seqlen_q")["tflops"]


def _ours(lower: pd.Series[float], row: Any) -> Iterator[tuple[str, str, float]]:
    if row.seqlen_q in lower.index:
        yield "below", "rung below", lower[row.seqlen_q]
    yield "here", "this rung", row.tflops


def _official(rows: pd.DataFrame) -> Iterator[tuple[str, str, float]]:
    timed = dict(zip(rows["version"], rows["tflops"], strict=True))
    for name, title in baselines.titles().items():
        if name in timed:
            yield "official", title, timed[name]


def _caption(gpu: str, ours: pd.DataFrame, which: str) -> str:
    first = ours.iloc[0]
    mask = "causal" if first["causal"] else "no mask"
    widths = "/".join(map(str, first[["head_dim", "head_dim_v"]].dropna().astype(int)))
    return (
        f"TFLOP/s by sequence length, {which}: {steps.title(gpu)}, bf16, head_dim {widths}, {mask}, one run "
        f"({first['time'][:10]})."
    )
