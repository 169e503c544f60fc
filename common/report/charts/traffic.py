"""HBM traffic of the textbook and of both loop orders, counted by running the loops."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from flashladder.common.measure.references import tiling
from flashladder.common.problem.problem import Problem
from flashladder.common.report.charts import theme
from flashladder.common.report.charts.theme import Chart, colour, figure, made_from, pixels
from flashladder.common.report.pictures.loops import algorithm

ORDERS = {"py_fa1": "fixed", "py_fa2": "own"}  # with their colours
BLOCKS = {64: 1.0, 128: 0.55}  # block_m = block_n, with how strong its bars are
LENGTHS = (256, 512, 1024)
WIDTH, HEIGHT, BAR = 700, 380, 0.16  # a bar's part of the lines of a length

Multiples = dict[int, dict[tuple[str, int], float]]  # by length; of each loop order and tile, the textbook's ("", 0)


def chart(path: Path) -> Chart:
    """The chart as a file."""
    counted = {length: multiples(length) for length in LENGTHS}
    return Chart(path, "HBM traffic", partial(draw, counted), made_from(repr(counted), Path(__file__), theme.CODE))


@figure
def draw(counted: Multiples) -> Figure:
    """For each length a bar of the textbook, and of each order and tile."""
    drawn = pixels(WIDTH, HEIGHT)
    axes = drawn.add_axes((0.1, 0.08, 0.86, 0.74))
    for place, (name, block) in enumerate(counted[LENGTHS[0]]):
        y = [line + (place - len(ORDERS)) * BAR for line in range(len(LENGTHS))]
        look: dict[str, Any] = {"color": colour(ORDERS.get(name, "muted")), "alpha": BLOCKS.get(block, 1.0)}
        label = f"{name}, B = {block}" if name else "textbook"
        bars = axes.barh(y, [each[name, block] for each in counted.values()], height=0.9 * BAR, label=label, **look)
        axes.bar_label(bars, fmt="%.1f", padding=4, color=colour("muted"), fontsize=11)
    axes.set(yticks=range(len(LENGTHS)), yticklabels=[f"S = {length:,}" for length in LENGTHS])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_title("Q, K, V and O once = 1; one head, d = 128, 16-bit; S: rows of Q, K and V; B: rows of a tile")
    drawn.legend(loc="upper left", ncols=5, bbox_to_anchor=(0, 1), borderaxespad=0, handlelength=0.8)
    return drawn


def multiples(length: int) -> dict[tuple[str, int], float]:
    """Of a length: bytes over those of Q, K, V and O once, counted on tensors without data."""
    problem = Problem(seqlen_q=length)
    q = torch.empty(1, length, 1, problem.head_dim, dtype=torch.bfloat16, device="meta")
    found = {("", 0): tiling.textbook_bytes(problem)}
    for block in BLOCKS:
        for name in ORDERS:
            hbm = tiling.Hbm()
            tiling.attention(algorithm(name), q, q, q, block_m=block, block_n=block, hbm=hbm)
            found[name, block] = hbm.total
    return {what: total / tiling.io_bytes(problem) for what, total in found.items()}
