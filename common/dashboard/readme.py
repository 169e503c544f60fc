"""The README's part on the ladder: a chart and a table for each GPU, and whether they are up to date."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pandas as pd

from flashladder.common import catalog
from flashladder.common.dashboard import figures
from flashladder.common.dashboard.view import registers, step
from flashladder.common.report import markers, theme
from flashladder.common.results import ladders

MARKER = "ladder"
CODE = tuple(Path(str(module.__file__)) for module in (theme, figures, ladders))  # that draws a chart
NOTHING = (
    "Nothing has been measured yet: `python tools/ladder.py`, on a machine with a GPU, times every rung beside\n"
    "FlashAttention-2, and `python tools/dashboard.py` puts the table and the chart here."
)


def write(readme: Path, folder: Path, summary: pd.DataFrame) -> list[Path]:
    """Brings the README and its charts up to date; the files that changed. ResultsError where it has no markers."""
    changed = []
    for gpu, lines in _by_gpu(summary).items():
        if _is_stale(chart := _chart(folder, gpu), gpu, folder):
            changed += theme.write(figures.ladder(_first_dtype(lines)), chart, _title(lines), _made_from(gpu, folder))
    return changed + ([readme] if markers.replace(readme, MARKER, text(readme, folder, summary)) else [])


def stale(readme: Path, folder: Path, summary: pd.DataFrame) -> list[Path]:
    """The files that `write` would change."""
    charts = [_chart(folder, gpu) for gpu in _by_gpu(summary) if _is_stale(_chart(folder, gpu), gpu, folder)]
    current = markers.between(readme, MARKER) == text(readme, folder, summary)
    return charts if current else [*charts, readme]


def text(readme: Path, folder: Path, summary: pd.DataFrame) -> str:
    """The part, in Markdown."""
    parts = [_part(readme, folder, gpu, lines) for gpu, lines in _by_gpu(summary).items()]
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


def _part(readme: Path, folder: Path, gpu: str, lines: pd.DataFrame) -> str:
    charts = {scheme: _relative(path, readme) for scheme, path in theme.files(_chart(folder, gpu)).items()}
    last = lines.iloc[-1]
    log = folder / f"ladder_{gpu}.csv"
    words = f"""
Means over {last["lengths"]} sequence lengths, beside FlashAttention-2 as torch {last["torch"]} ships it,
driver {last["driver"]}, {last["time"][:10]}. A ratio is its time / ours in the same rounds, with a 95 % interval;
a step is the change against the rung below. TFLOP/s of two runs may differ by the GPU's clock. *Own* is what the tuner
found, and where it did not search the rung's default; *fixed* is one for all, which shows the technique apart from the
tuning. Made by tools/dashboard.py from [{folder.name}/{log.name}]({_relative(log, readme)}).
{_unmeasured(lines)}"""
    picture = f"""
<picture>
  <source media="(prefers-color-scheme: dark)" srcset="{charts["dark"]}">
  <img alt="{_title(lines)}" src="{charts["light"]}">
</picture>
"""
    return "\n\n".join([picture.strip(), "\n".join(_table(lines)), words.strip()])


def _unmeasured(lines: pd.DataFrame) -> str:
    """A sentence on the rungs that are not in the log; empty where all are."""
    left = {rung.name: rung.title for rung in catalog.versions() if rung.name not in set(lines["version"])}
    links = [f"[{catalog.address_of(name)}](versions/{name}) ({title})" for name, title in left.items()]
    return f"Not measured yet: {', '.join(links)}." if links else ""


def _table(lines: pd.DataFrame) -> list[str]:
    """A line a rung: in full of the first dtype, of others the ratio."""
    first = _first_dtype(lines)
    others = [dtype for dtype in lines["dtype"].unique() if dtype != first["dtype"].iloc[0]]
    head = ["rung", "technique", "TFLOP/s", "own", "95 %", "step", "fixed", "step", *others, "registers"]
    made = [_row(head), _row(["---", "---", *["---:"] * (len(head) - 2)])]
    for version, group in first.groupby("version", sort=True):
        kinds = {row.kind: row for row in group.itertuples()}
        own, fixed = kinds["own"], kinds.get("fixed")
        also = [_ratio(lines, version, dtype) for dtype in others]
        interval = f"{own.ratio_low:.3f} to {own.ratio_high:.3f}"
        cells = [
            f"[{own.rung}](versions/{version})",
            own.title,
            f"{own.tflops:.0f}",
            f"**{own.ratio:.3f}**",
            interval,
            step(own),
        ]
        cells += [f"{fixed.ratio:.3f}" if fixed else "", step(fixed), *also]
        made.append(_row([*cells, registers(own)]))
    official = ["", "FlashAttention-2", f"{first['official_tflops'].median():.0f}", "1"]
    return [*made, _row(official + [""] * (len(head) - len(official)))]


def _ratio(lines: pd.DataFrame, version: str, dtype: str) -> str:
    found = lines[(lines["version"] == version) & (lines["dtype"] == dtype) & (lines["kind"] == "own")]["ratio"]
    return f"{found.iloc[0]:.3f}" if len(found) else ""


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _relative(path: Path, readme: Path) -> str:
    return Path(os.path.relpath(path, readme.parent)).as_posix()
