"""What is said of a line of the ladder (of `ladders.summary`), and one run as tables that fit 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.table import Table
from rich.text import Text

from flashladder.common.console import table
from flashladder.common.problem.config import parse_values
from flashladder.common.records import ladders
from flashladder.common.records.ladder_runs import FIELD, FIXED, MOST_THERMAL, OWN, Ladder
from flashladder.common.records.records import spilled
from flashladder.common.records.slowdowns import completed

if TYPE_CHECKING:
    from rich.console import RenderableType


def step(row: Any) -> str:
    """A line's gain on the rung below, with half of its 95 % interval; empty where the two were not paired."""
    if row is None or row.step != row.step:
        return ""
    if row.step == row.step_low == row.step_high == 1:
        return "same code"
    half = max(row.step_high - row.step, row.step - row.step_low)
    return f"x {row.step:.2f} ± {half:.2f}" if row.step > 2 else f"{100 * (row.step - 1):+.1f} ± {100 * half:.1f} %"


def is_clear(row: Any) -> bool:
    """Whether the whole interval of a line's step is on one side."""
    return bool(row.step_low > 1 or row.step_high < 1)


def registers(row: Any) -> str:
    """A line's registers, and the bytes that a thread spills and reloads."""
    spills = spilled(row)
    return f"{row.registers:.0f}" + (f" + {spills} B" if spills else "")


def official(lines: pd.DataFrame) -> str:
    """The rate of FlashAttention-2 beside these lines; of joined runs, which have one each, the least and the most."""
    rates = f"{lines['official_tflops'].min():.0f}", f"{lines['official_tflops'].max():.0f}"
    several = lines["run"].nunique() > 1 and rates[0] != rates[1]
    return " to ".join(rates) if several else f"{lines['official_tflops'].median():.0f}"


def tile(config: str) -> str:
    """The tile and the warps of a configuration, as far as it has them: 128x64x4."""
    values = parse_values(config)
    return "x".join(str(values[name]) for name in ("block_m", "block_n", "num_warps") if name in values)


def configuration(row: Any) -> str:
    """Which configuration a line's figures are of, and who chose it."""
    if row.chosen_by == ladders.BY_LENGTH:
        return f"{tile(row.config)} for long keys, tuned by length"
    chosen = {"tuner": "tuned", "default": "default", FIXED: "the fixed one, faster than its own"}
    return f"{tile(row.config)}, {chosen[row.chosen_by]}"


def of_run(frame: pd.DataFrame, gpu: str, name: str) -> Iterator[RenderableType]:
    """What a log says of the run of this name: for each dtype the rungs and the field, then a run on another card."""
    ladder = Ladder.of(completed(frame), name)
    if ladder is None:
        return
    yield Text(f"\nrun {ladder.runs[0]}")
    if ladder.runs[0].is_hot:
        limit = f"more than {100 * MOST_THERMAL:.0f} % of the samples"
        yield Text(f"Not to be published: thermal slowdown in {limit}. It stays in the log, and out of tables.", "red")
    lines = ladders.summary({gpu: ladder})
    for dtype, of_dtype in lines.groupby("dtype", sort=False):
        yield _rungs(str(dtype), of_dtype)
        if ladder.again:
            yield _again(str(dtype), of_dtype, ladder)


def _rungs(dtype: str, lines: pd.DataFrame) -> Table:
    figures = ("TFLOP/s", "own ratio", "step", "fixed", "its step")
    title = f"{dtype}: means over the lengths, ratios to FlashAttention-2, ± half of 95 %"
    made = table(title, "", *figures, "config", right=figures)
    made.padding = (0, 1, 0, 0)
    for version, group in lines.groupby("version", sort=False):
        kinds = {row.kind: row for row in group.itertuples()}
        first, fixed = kinds.get(OWN) or kinds[FIELD], kinds.get(FIXED)
        half = max(first.ratio_high - first.ratio, first.ratio - first.ratio_low)
        cells = [f"{first.tflops:.0f}", f"{first.ratio:.3f} ± {half:.3f}", step(first)]
        cells += [f"{fixed.ratio:.3f}", step(fixed)] if fixed else ["", ""]
        made.add_row(first.rung or str(version), *cells, first.chosen_by if first.rung else "")
    made.add_row("fa2", official(lines), "1")
    return made


def _again(dtype: str, lines: pd.DataFrame, ladder: Ladder) -> Table:
    """Both runs side by side."""
    assert ladder.again is not None
    runs = (f"run {ladder.runs[0].name}", f"run {ladder.again.name}")
    made = table(f"{dtype}: own ratios on two cards", "", *runs, "gap", right=(*runs, "gap"))
    for row in lines[(lines["kind"] != FIXED) & lines["again"].notna()].itertuples():
        made.add_row(row.rung or row.version, f"{row.ratio:.3f}", f"{row.again:.3f}", ladders.gap(row))
    return made
