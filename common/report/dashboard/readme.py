"""The README's part on the ladder: a chart and a table for each GPU, and whether they are up to date."""

from __future__ import annotations

import hashlib
import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from flashladder.common import catalog
from flashladder.common.problem.config import listing
from flashladder.common.records import ladder_runs, ladders
from flashladder.common.records.ladder_runs import FIELD, FIXED, OWN, Ladder
from flashladder.common.report import markers, theme
from flashladder.common.report.dashboard import figures
from flashladder.common.report.ladder_tables import configuration, official, registers, step

MARKER = "ladder"
WIDTH = 120  # of lines
CODE = tuple(Path(str(module.__file__)) for module in (theme, figures, ladders, ladder_runs))  # that draws a chart
NOTHING = (
    "Nothing has been measured yet: `flashladder ladder`, on a machine with a GPU, times every rung beside\n"
    "FlashAttention-2, and `flashladder dashboard` puts the table and the chart here."
)
Ladders = Mapping[str, Ladder]


def write(readme: Path | None, folder: Path, shown: Ladders, summary: pd.DataFrame) -> list[Path]:
    """Brings the charts and, where there is one, the README up to date; the files that changed. ResultsError where it
    has no markers."""
    changed = []
    for gpu, lines in _by_gpu(summary).items():
        if _is_stale(chart := _chart(folder, gpu), gpu, folder):
            changed += theme.write(figures.ladder(_first_dtype(lines)), chart, _title(lines), _made_from(gpu, folder))
    is_new = readme is not None and markers.replace(readme, MARKER, text(readme, folder, shown, summary))
    return changed + ([readme] if readme is not None and is_new else [])


def stale(readme: Path | None, folder: Path, shown: Ladders, summary: pd.DataFrame) -> list[Path]:
    """The files that `write` would change."""
    charts = [_chart(folder, gpu) for gpu in _by_gpu(summary) if _is_stale(_chart(folder, gpu), gpu, folder)]
    if readme is None or markers.between(readme, MARKER) == text(readme, folder, shown, summary):
        return charts
    return [*charts, readme]


def text(readme: Path, folder: Path, shown: Ladders, summary: pd.DataFrame) -> str:
    """The part, in Markdown: of the GPUs with a ladder of one run, and of joined ones where there is none."""
    whole = {gpu for gpu, ladder in shown.items() if ladder.is_one_run}
    parts = [
        _part(readme, folder, shown[gpu], lines) for gpu, lines in _by_gpu(summary).items() if gpu in whole or not whole
    ]
    return "\n\n".join(parts) or NOTHING


def _by_gpu(summary: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return {str(gpu): lines for gpu, lines in summary.groupby("gpu", sort=False)} if len(summary) else {}


def _first_dtype(lines: pd.DataFrame) -> pd.DataFrame:
    return lines[lines["dtype"] == lines["dtype"].iloc[0]]


def _title(lines: pd.DataFrame) -> str:
    limits = ladders.Limits.of(lines["gpu"].iloc[0])
    return f"The ladder on {limits.title if limits else lines['gpu'].iloc[0]}, {lines['dtype'].iloc[0]}"


def _chart(folder: Path, gpu: str) -> Path:
    return folder / f"ladder_{gpu}.svg"


def _is_stale(chart: Path, gpu: str, folder: Path) -> bool:
    return any(theme.note_of(file) != _made_from(gpu, folder) for file in theme.files(chart).values())


def _made_from(gpu: str, folder: Path) -> str:
    """A digest of what decides a chart: the log, the rungs' titles, and the code that draws it."""
    log = folder / f"ladder_{gpu}.csv"
    digest = hashlib.sha256(repr(ladders.titles()).encode())
    for file in (log, *CODE):
        digest.update(file.read_bytes())
    return f"made from {log.name}, {digest.hexdigest()[:16]}"


def _part(readme: Path, folder: Path, ladder: Ladder, lines: pd.DataFrame) -> str:
    gpu = lines["gpu"].iloc[0]
    charts = {scheme: _relative(path, readme) for scheme, path in theme.files(_chart(folder, gpu)).items()}
    log = folder / f"ladder_{gpu}.csv"
    first = _first_dtype(lines)
    words = textwrap.fill(
        f"Means over {first['lengths'].max()} sequence lengths{_fewer(first)}, beside FlashAttention-2 as torch "
        f"{first['torch'].iloc[0]} ships it. A ratio is its time / ours in the same rounds, with a 95 % interval. "
        "A step is the change against the rung below, from rounds of one run that both took part in, ± half of its "
        "95 % interval. *Own* is what the tuner found, and where it did not search the rung's default; *fixed* is one "
        "for all, which shows the technique apart from the tuning. Where the fixed one is the faster, it is the own "
        "one too. Configurations are block_m x block_n x num_warps; the registers are those of the own one. "
        f"{_unmeasured(lines)}Made by `flashladder dashboard` from "
        f"[{folder.name}/{log.name}]({_relative(log, readme)}).",
        WIDTH,
        break_long_words=False,
        break_on_hyphens=False,
    )
    picture = f"""
<picture>
  <source media="(prefers-color-scheme: dark)" srcset="{charts["dark"]}">
  <img alt="{_title(lines)}" src="{charts["light"]}">
</picture>
"""
    head = f"{_verdict(first)}\n\n{textwrap.fill(ladder.source, WIDTH)}"
    return "\n\n".join([head, picture.strip(), "\n".join(_table(lines)), words, *_on_two_cards(first, ladder)])


def _verdict(lines: pd.DataFrame) -> str:
    """What the ladder comes to, beside which libraries and on what."""
    limits = ladders.Limits.of(lines["gpu"].iloc[0])
    own, field = lines[lines["kind"] == OWN], ladders.field(lines)
    best = own.loc[own["ratio"].idxmax()]
    steps = own[own["step"].notna()]
    others = [f"{row.title} at {row.ratio:.2f}" for row in field.itertuples()]
    gains = f" Of {len(steps)} steps {int((steps['step_low'] > 1).sum())} are gains." if len(steps) else ""
    return textwrap.fill(
        f"On an {limits.title if limits else lines['gpu'].iloc[0]}, {lines['dtype'].iloc[0]}, the fastest rung is "
        f"{best['rung']}, at {best['ratio']:.2f} times FlashAttention-2"
        + (f"; beside it, {listing(others)}." if others else ".")
        + gains,
        WIDTH,
    )


def _fewer(lines: pd.DataFrame) -> str:
    fewer = lines[lines["lengths"] < lines["lengths"].max()].drop_duplicates("version")
    names = [f"{row.rung or row.title}: {row.lengths}" for row in fewer.itertuples()]
    return f" ({', '.join(names)})" if names else ""


def _on_two_cards(lines: pd.DataFrame, ladder: Ladder) -> list[str]:
    """Two runs side by side, folded."""
    if ladder.again is None:
        return []
    dtype = lines["dtype"].iloc[0]
    head = ["rung", f"run {ladder.runs[0].name}", f"run {ladder.again.name}", "gap"]
    made = [_row(head), _row(["---", *["---:"] * 3])]
    for row in lines[(lines["kind"] != FIXED) & lines["again"].notna()].itertuples():
        cells = [f"{row.ratio:.3f}", f"{row.again:.3f}", ladders.gap(row)]
        made.append(_row([f"{row.rung} {row.title}".strip(), *cells]))
    table = "\n".join(made)
    return [f"<details><summary>The same on another card, {dtype}: own ratios</summary>\n\n{table}\n\n</details>"]


def _unmeasured(lines: pd.DataFrame) -> str:
    """A sentence on the rungs that are not in the table; empty where all are."""
    left = {rung.name: rung.title for rung in catalog.finished() if rung.name not in set(lines["version"])}
    links = [f"[{catalog.address_of(name)}](versions/{name}) ({title})" for name, title in left.items()]
    return f"Not measured in what is shown: {', '.join(links)}. " if links else ""


def _table(lines: pd.DataFrame) -> list[str]:
    """A line a rung: in full of the first dtype, of others the ratio."""
    first = _first_dtype(lines)
    others = [dtype for dtype in lines["dtype"].unique() if dtype != first["dtype"].iloc[0]]
    head = ["rung", "technique", "TFLOP/s", "own", "95 %", "step", "fixed", "step", *others, "registers"]
    made = [_row([*head, "configuration"]), _row(["---", "---", *["---:"] * (len(head) - 2), "---"])]
    for version, group in first[first["kind"] != FIELD].groupby("version", sort=True):
        kinds = {row.kind: row for row in group.itertuples()}
        own, fixed = kinds[OWN], kinds.get(FIXED)
        cells = [f"[{own.rung}](versions/{version})", own.title, *_figures(own), step(own)]
        cells += [f"{fixed.ratio:.3f}" if fixed else "", step(fixed)]
        cells += [_ratio(lines, version, dtype, OWN) for dtype in others]
        made.append(_row([*cells, registers(own), configuration(own)]))
    beside = [["", "FlashAttention-2", official(first), "1"]]
    for row in ladders.field(first).itertuples():
        also = [_ratio(lines, row.version, dtype, FIELD) for dtype in others]
        beside.append(["", row.title, *_figures(row), "", "", "", *also])
    return [*made, *(_row(cells + [""] * (len(head) + 1 - len(cells))) for cells in beside)]


def _figures(row: Any) -> list[str]:
    return [f"{row.tflops:.0f}", f"**{row.ratio:.3f}**", f"{row.ratio_low:.3f} to {row.ratio_high:.3f}"]


def _ratio(lines: pd.DataFrame, version: str, dtype: str, kind: str) -> str:
    found = lines[(lines["version"] == version) & (lines["dtype"] == dtype) & (lines["kind"] == kind)]["ratio"]
    return f"{found.iloc[0]:.3f}" if len(found) else ""


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _relative(path: Path, readme: Path) -> str:
    return Path(os.path.relpath(path, readme.parent)).as_posix()
