"""What is said of a line of the ladder (of `ladders.summary`), and one run as tables that fit 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.table import Table
from rich.text import Text

from flashladder.common.problem.config import Value, parse_values, spell
from flashladder.common.records import ladders
from flashladder.common.records.ladder_runs import FIELD, FIXED, MOST_THERMAL, OWN, Ladder
from flashladder.common.records.records import spilled
from flashladder.common.records.slowdowns import completed
from flashladder.common.report import formats
from flashladder.common.report.tables import Rows, numbers, table

if TYPE_CHECKING:
    from rich.console import RenderableType

# Those that `flashladder ladder` fixes; the others have each rung's default.
FIXED_FIELDS = ("block_m", "block_n", "num_warps", "q_fragments", "k_fragments", "v_fragments", "double_buffer")


def step(row: Any) -> str:
    """A line's gain on the rung below, with half of its 95 % interval; empty where the two were not paired.

    Where the interval holds 1.00 there is none, whatever its middle.
    """
    if row is None or row.step != row.step:
        return ""
    if row.step == row.step_low == row.step_high == 1:
        return "same code"
    if not is_clear(row):
        return "no gain"
    half = formats.half(row.step, row.step_low, row.step_high)
    return f"x {row.step:.2f} ± {half:.2f}" if row.step > 2 else f"{100 * (row.step - 1):+.1f} ± {100 * half:.1f} %"


def is_clear(row: Any) -> bool:
    """Whether a step is larger than the half of its interval, as both are shown."""
    half = formats.half(row.step, row.step_low, row.step_high)
    return bool(round(abs(100 * (row.step - 1)), 1) > round(100 * half, 1))


def registers(row: Any) -> str:
    """A line's registers, and the bytes that a thread spills and reloads."""
    spills = spilled(row)
    return f"{row.registers:.0f}" + (f" + {spills} B" if spills else "")


def official(lines: pd.DataFrame) -> str:
    """The rate of FlashAttention-2 beside these lines; of joined runs, which have one each, the least and the most."""
    rates, unit = lines["official_rate"], lines["unit"].iloc[0]
    least, middle, most = (formats.mean_rate(rate, unit) for rate in (rates.min(), rates.median(), rates.max()))
    return f"{least} to {most}" if lines["run"].nunique() > 1 and least != most else middle


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


def fixed_configuration(lines: pd.DataFrame) -> str:
    """The configuration that all rungs were timed in, as far as they have its fields; empty where none was."""
    found: dict[str, set[Value]] = {}
    for config in lines[lines["kind"] == FIXED]["config"]:
        for name, value in parse_values(config).items():
            found.setdefault(name, set()).add(value)
    return ", ".join(f"{name}={spell(*found[name])}" for name in FIXED_FIELDS if len(found.get(name, ())) == 1)


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
            yield table(f"{dtype}: own ratios on two cards", *on_two_cards(of_dtype, ladder))


def _rungs(dtype: str, lines: pd.DataFrame) -> Table:
    columns = ["", *numbers(lines["unit"].iloc[0], "own ratio", "step", "fixed", "its step"), "config"]
    title = f"{dtype}: means over the lengths, ratios to FlashAttention-2, ± half of 95 %"
    made = table(title, columns)
    made.padding = (0, 1, 0, 0)
    for version, group in lines.groupby("version", sort=False):
        kinds = {row.kind: row for row in group.itertuples()}
        first, fixed = kinds.get(OWN) or kinds[FIELD], kinds.get(FIXED)
        half = formats.half(first.ratio, first.ratio_low, first.ratio_high)
        cells = [formats.mean_rate(first.rate, first.unit), f"{formats.ratio(first.ratio)} ± {half:.3f}", step(first)]
        cells += [formats.ratio(fixed.ratio), step(fixed)] if fixed else ["", ""]
        made.add_row(first.rung or str(version), *cells, first.chosen_by if first.rung else "")
    made.add_row("fa2", official(lines), "1")
    if fixed_config := fixed_configuration(lines):
        made.caption = f"fixed: {fixed_config}"
    return made


def on_two_cards(lines: pd.DataFrame, ladder: Ladder, in_full: bool = False) -> tuple[list[str], Rows]:
    """The own ratios of two runs side by side, and the gap; `in_full`, with titles."""
    assert ladder.again is not None
    rows = []
    for row in lines[(lines["kind"] != FIXED) & lines["again"].notna()].itertuples():
        name = f"{row.rung} {row.title}".strip() if in_full else row.rung or row.version
        rows.append((name, formats.ratio(row.ratio), formats.ratio(row.again), ladders.gap(row)))
    return ["rung", *numbers(f"run {ladder.runs[0].name}", f"run {ladder.again.name}", "gap")], rows
