"""The pictures of the experiments; each takes the rows of one run, and says whether they were measured or counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, NullLocator

from flashladder.common.problem.config import KernelConfig
from flashladder.common.records.records import spilled
from flashladder.common.report.charts.theme import colour, figure, pixels, tip
from flashladder.common.studies.experiments import traffic
from flashladder.common.studies.experiments.sweeps import FA1, FA2

WIDTH = 860
MIB = 2**20
BASELINES = {"fa2": "FlashAttention-2", "math": "textbook"}
ROLES = {"fa2": "official", "math": "fixed"}  # the colours of the baselines; ours have that of `own`


def latest(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the latest run; of one on a GPU, where there is any."""
    on_gpu = frame[frame["device"] != "emulator"]
    rows = on_gpu if len(on_gpu) else frame
    return rows[rows["run"] == rows["run"].iloc[-1]] if len(rows) else rows


def source(frame: pd.DataFrame) -> str:
    """Where the rows come from, in words."""
    device = frame["device"].iloc[-1]
    return "counted by the emulator" if device == "emulator" else f"measured on {device}"


@figure
def loop_order(frame: pd.DataFrame) -> Figure:
    """Bytes over sequence length in the two orders, counted and by formula; what the longest one reads and writes."""
    drawn = pixels(WIDTH, 330)
    over_length, longest = _panels(drawn, 330, (0.07, 0.5), (0.7, 0.27))
    formulas = {FA1: (traffic.fa1, "block_n", "fixed"), FA2: (traffic.fa2, "block_m", "own")}
    for y, (label, (formula, tile, role)) in enumerate(formulas.items()):
        rows = frame[(frame["label"] == label) & (frame["config"] != "")]
        if rows.empty:  # a run that was killed, or lost a row
            continue
        config = KernelConfig.parse(rows["config"].iloc[-1])
        expected = [sum(formula(s, config.head_dim, getattr(config, tile))) / MIB for s in rows["seqlen_q"]]
        over_length.plot(rows["seqlen_q"], expected, color=colour(role), label=label)
        for row in rows.itertuples():
            total = (row.global_bytes_read + row.global_bytes_written) / MIB
            tip(
                over_length.plot(row.seqlen_q, total, "o", color=colour(role))[0],
                f"{label}, S = {row.seqlen_q}: {total:.2f} MiB",
            )
        _bars(longest, y, rows.iloc[-1], role)
    over_length.set_title("MiB of one head, over S")
    over_length.legend(loc="upper left")
    _logarithmic(over_length)
    longest.set(yticks=(0, 1), yticklabels=("FA1", "FA2"), ylim=(1.6, -0.6))
    longest.grid(axis="y", visible=False)
    longest.set_title(f"read + written, at S = {frame['seqlen_q'].max()}")
    return drawn


def _bars(axes: Axes, y: int, row: pd.Series[float], role: str) -> None:
    read, written = row["global_bytes_read"] / MIB, row["global_bytes_written"] / MIB
    tip(axes.barh(y, read, height=0.6, color=colour(role))[0], f"{row['label']} reads {read:.2f} MiB")
    tip(
        axes.barh(y, written, left=read, height=0.6, color=colour(role), alpha=0.45)[0],
        f"{row['label']} writes {written:.2f} MiB",
    )
    axes.annotate(
        f"{read:.1f} + {written:.1f}", (0, y + 0.32), (2, -11), textcoords="offset points", color=colour("muted")
    )


@figure
def blocks(frame: pd.DataFrame) -> Figure:
    """A cell for each tile and number of warps: TFLOP/s, or of the emulator MiB from global memory."""
    rows = frame[frame["config"] != ""].assign(parsed=lambda f: [KernelConfig.parse(name) for name in f["config"]])
    on_gpu = rows["time_us"].notna().any()
    columns = sorted({config.block_n for config in rows["parsed"]})
    lines = sorted({(config.block_m, config.num_warps) for config in rows["parsed"]})
    height = 66 * len(lines) + 74
    drawn = pixels(WIDTH, height)
    axes = drawn.add_axes((0.2, 0, 0.78, 1 - 74 / height))
    values = rows["tflops"] if on_gpu else (rows["global_bytes_read"] + rows["global_bytes_written"]) / MIB
    for row, value in zip(rows.itertuples(), values, strict=True):
        place = columns.index(row.parsed.block_n), lines.index((row.parsed.block_m, row.parsed.num_warps))
        _cell(axes, place, value, value / values.max(), row, on_gpu)
    names = [f"block_m = {block_m}, {warps} warps" for block_m, warps in lines]
    axes.set(
        xlim=(-0.5, len(columns) - 0.5), ylim=(len(lines) - 0.5, -0.5), yticks=range(len(lines)), yticklabels=names
    )
    axes.set(xticks=range(len(columns)), xticklabels=[f"block_n = {columns_}" for columns_ in columns])
    axes.xaxis.tick_top()
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    what = "TFLOP/s" if on_gpu else "MiB between global memory and the SMs"
    drawn.text(0, 0.99, f"{what}; below, registers and bytes spilled", weight="bold", va="top")
    return drawn


def _cell(axes: Axes, place: tuple[int, int], value: float, share: float, row: Any, on_gpu: bool) -> None:
    x, y = place
    box = Rectangle(
        (x - 0.48, y - 0.46), 0.96, 0.92, facecolor=colour("own"), alpha=0.5 * share if share == share else 0
    )
    tip(axes.add_patch(box), row.config)
    text = (f"{value:.0f}" if on_gpu else f"{value:.2f}") if value == value else "wrong"
    axes.text(x, y - 0.1, text, ha="center", va="center", fontsize=15)
    spills = spilled(row)
    detail = f"{row.registers:.0f} registers" + (f", {spills} B" if spills else "")
    axes.text(x, y + 0.27, detail, ha="center", va="center", fontsize=10, color=colour("muted"))


@figure
def dtypes(frame: pd.DataFrame) -> Figure:
    """Of each rung and type the rate (or, of the emulator, warp instructions) and the largest error."""
    ours = frame[~frame["version"].isin(BASELINES)]
    rungs = list(dict.fromkeys(ours["version"]))
    on_gpu = ours["time_us"].notna().any()
    height = 44 * len(rungs) + 84
    drawn = pixels(WIDTH, height)
    work, error = _panels(drawn, height, (0.24, 0.36), (0.66, 0.32))
    for (dtype, role), shift in zip({"bf16": "own", "fp16": "fixed"}.items(), (-0.18, 0.18), strict=True):
        for row in ours[ours["dtype"] == dtype].itertuples():
            y = rungs.index(row.version) + shift
            amount = row.tflops if on_gpu else row.instructions
            tip(work.barh(y, amount, height=0.34, color=colour(role))[0], f"{row.version}, {dtype}: {amount:,.0f}")
            words = f"{row.version}, {dtype}: {row.max_error:.2e}, tolerance {row.tolerance:.2e}"
            tip(error.plot(row.max_error, y, "o", color=colour(role))[0], words)
            error.plot(row.tolerance, y, "|", color=colour(role), markersize=11, markeredgewidth=2)
    names = [version.replace("_", " ") for version in rungs]
    work.set(yticks=range(len(rungs)), yticklabels=names, ylim=(len(rungs) - 0.5, -0.5))
    work.set_title("TFLOP/s" if on_gpu else "warp instructions")
    error.set(xscale="log", yticks=range(len(rungs)), yticklabels=[], ylim=(len(rungs) - 0.5, -0.5))
    decades = np.log10([ours["max_error"].min(), ours["tolerance"].max()])
    error.set_xlim(10 ** np.floor(decades[0]), 10 ** np.ceil(decades[1]))
    error.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))
    for axes in (work, error):
        axes.grid(axis="y", visible=False)
    error.set_title("largest error, and tolerance ( | )")
    handles = [Rectangle((0, 0), 1, 1, color=colour(role), label=d) for d, role in (("bf16", "own"), ("fp16", "fixed"))]
    drawn.legend(handles=handles, loc="upper left", ncols=2, bbox_to_anchor=(0, 1), borderaxespad=0, handlelength=0.8)
    return drawn


@figure
def seqlens(frame: pd.DataFrame) -> Figure:
    """Time (of the emulator: warp instructions) and memory over sequence length: ours and the baselines."""
    drawn = pixels(WIDTH, 340)
    work, memory = _panels(drawn, 340, (0.07, 0.38), (0.56, 0.42))
    on_gpu = frame["time_us"].notna().any()
    for label, rows in frame.groupby("label", sort=False):
        role, name = ROLES.get(str(label), "own"), BASELINES.get(str(label), f"rung {label}")
        amounts = rows["time_us"] / 1e3 if on_gpu else rows["instructions"]
        for axes, values in ((work, amounts), (memory, rows["memory_bytes"] / MIB)):
            axes.plot(rows["seqlen_q"], values, color=colour(role), label=name)
            for length, value in zip(rows["seqlen_q"], values, strict=True):
                tip(axes.plot(length, value, "o", color=colour(role))[0], f"{name}, S = {length}: {value:,.3g}")
    work.set_title("milliseconds, over S" if on_gpu else "warp instructions, over S")
    memory.set_title("MiB beyond Q, K and V, over S" + ("" if on_gpu else " (by formula)"))
    memory.legend(loc="upper left")
    for axes in (work, memory):
        _logarithmic(axes)
    return drawn


DRAW: dict[str, Callable[[pd.DataFrame], Figure]] = {
    "blocks": blocks,
    "dtypes": dtypes,
    "seqlens": seqlens,
    "loop_order": loop_order,
}


def _panels(drawn: Figure, height: float, *places: tuple[float, float]) -> list[Axes]:
    """Axes side by side: where each begins and how wide it is, as parts of the picture's width."""
    return [drawn.add_axes((left, 34 / height, width, 1 - 74 / height)) for left, width in places]


def _logarithmic(axes: Axes) -> None:
    """Both axes in powers of two (lengths) and ten, with plain numbers."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axis.set_minor_locator(NullLocator())
