"""The fastest rung beside the fastest official kernel, cell by cell: a table in the README, and results/cells.md.

A cell is a head_dim, a mask and a length. `flashladder bench` logs them: --log cells_GPU. Only kernels of one run are
compared, those of the latest run of each dtype, head_dim and mask.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import pandas as pd

from flashladder.common import catalog
from flashladder.common.measure import baselines
from flashladder.common.problem.config import listing, load_gpu
from flashladder.common.records.records import unbounded
from flashladder.common.report import markers
from flashladder.common.report.dashboard import references

MARKER = "cells"
PAGE = "cells.md"  # in the folder of results
_KIND = ["dtype", "head_dim", "causal"]
Cells = Mapping[str, pd.DataFrame]


class Best(NamedTuple):
    """Of one length: a rung's address, and the time of the fastest official kernel over the rung's."""

    rung: str
    ratio: float


def write(readme: Path | None, folder: Path, logged: Cells) -> list[Path]:
    """Brings the README's part and the page up to date, where they have markers; those that changed."""
    return [path for path, text in _texts(readme, folder, logged).items() if markers.replace(path, MARKER, text)]


def stale(readme: Path | None, folder: Path, logged: Cells) -> list[Path]:
    """The files that `write` would change."""
    return [path for path, text in _texts(readme, folder, logged).items() if markers.between(path, MARKER) != text]


def latest(rows: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Of each dtype, head_dim and mask the rows of the latest run: those timed without a window and a softcap."""
    timed = rows[rows["ratio"].notna() & unbounded(rows)]
    for _, group in timed.groupby(_KIND):
        run = group.sort_values("time", kind="stable")["run"].iloc[-1]
        yield group[group["run"] == run]


def best(rows: pd.DataFrame) -> dict[int, Best]:
    """By length the fastest rung of a run; lengths at which no official kernel or no rung was timed are left out."""
    found = {}
    for seqlen, group in rows.groupby("seqlen_q"):
        is_official = group["version"].isin(list(baselines.titles()))
        if is_official.any() and not is_official.all():
            ours = group[~is_official].sort_values("time_us").iloc[0]
            ratio = float(group[is_official]["time_us"].min() / ours["time_us"])
            found[int(str(seqlen))] = Best(catalog.address_of(str(ours["version"])), ratio)
    return found


def _texts(readme: Path | None, folder: Path, logged: Cells) -> dict[Path, str]:
    made = {gpu: list(latest(rows)) for gpu, rows in logged.items() if len(rows)}
    if not made:
        return {}
    texts = {folder / PAGE: "\n\n".join(_of_gpu(gpu, runs) for gpu, runs in made.items())}
    if readme is not None:
        texts[readme] = "\n\n".join(_short(gpu, runs) for gpu, runs in made.items())
    return {path: text for path, text in texts.items() if markers.has(path, MARKER)}


def _of_gpu(gpu: str, runs: list[pd.DataFrame]) -> str:
    return "\n\n".join(references.table(rows, f"cells_{gpu}.csv").markdown for rows in runs)


def _short(gpu: str, runs: list[pd.DataFrame]) -> str:
    """A line for each dtype, head_dim and mask."""
    of_kind = {_kind(rows): best(rows) for rows in runs}
    lengths = sorted({seqlen for cells in of_kind.values() for seqlen in cells})
    made = [["S", *map(str, lengths), "mean"], ["---", *["---:"] * (len(lengths) + 1)]]
    for kind, cells in of_kind.items():
        mean = math.exp(fmean(math.log(cell.ratio) for cell in cells.values()))
        line = [f"{cells[seqlen].ratio:.2f} ({cells[seqlen].rung})" if seqlen in cells else "" for seqlen in lengths]
        made.append([kind, *line, f"**{mean:.2f}**"])
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in made)
    return f"{_words(gpu, runs)}\n\n{table}"


def _words(gpu: str, runs: list[pd.DataFrame]) -> str:
    device = load_gpu(gpu).title
    official = baselines.titles().items()
    beside = {
        dtype: [title for name, title in official if any(name in set(rows["version"]) for rows in of_dtype)]
        for dtype in dict.fromkeys(str(rows["dtype"].iloc[0]) for rows in runs)
        if (of_dtype := [rows for rows in runs if rows["dtype"].iloc[0] == dtype])
    }
    field = "; ".join(f"{dtype}: {listing(titles)}" for dtype, titles in beside.items())
    days = sorted({str(time)[:10] for rows in runs for time in rows["time"]})
    shapes = {(row.num_heads, row.batch * row.seqlen_q) for rows in runs for row in rows.itertuples()}
    sizes = listing(f"{heads} heads and {tokens:,} tokens" for heads, tokens in sorted(shapes))
    return textwrap.fill(
        f"On an {device} ({listing(days)}), {sizes}: the time of the fastest official kernel over that of the fastest "
        f"rung, whose number is in brackets. Official kernels are {field}. Each line is one process. The mean is "
        "geometric.",
        references.WIDTH,
    )


def _kind(rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    return f"{first['dtype']}, d{first['head_dim']}{', causal' if first['causal'] else ''}"
