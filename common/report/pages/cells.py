"""The fastest rung beside the fastest official kernel, cell by cell: a table in the README, and results/cells.md.

A cell is a head_dim, a mask and a length. `flashladder bench` logs them: --log cells_GPU. Only kernels of one run are
compared, those of the latest run of each dtype, head_dim and mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import pandas as pd

from flashladder.common import catalog
from flashladder.common.measure import baselines
from flashladder.common.problem.config import load_gpu
from flashladder.common.records.records import unbounded
from flashladder.common.report import formats
from flashladder.common.report.pages import references
from flashladder.common.report.sections import Section
from flashladder.common.report.tables import numbers
from flashladder.common.report.templating import render

MARKER = "cells"
PAGE = "cells.md"  # in the folder of results
_KIND = ["dtype", "head_dim", "causal"]
Cells = Mapping[str, pd.DataFrame]
Runs = list[pd.DataFrame]


class Best(NamedTuple):
    """Of one length: a rung's address, and the time of the fastest official kernel over the rung's."""

    rung: str
    ratio: float


def sections(readme: Path | None, folder: Path, logged: Cells) -> list[Section]:
    """The README's part and the page, where they have markers."""
    made = {gpu: runs for gpu, rows in logged.items() if (runs := list(latest(rows)))}
    texts = {folder / PAGE: _in_full, **({readme: _short} if readme else {})}
    found = [Section(path, MARKER, partial(_text, made, of_gpu)) for path, of_gpu in texts.items()]
    return [section for section in found if made and section.has_place]


def _text(made: Mapping[str, Runs], of_gpu: Callable[[str, Runs], str]) -> str:
    return "\n\n".join(of_gpu(gpu, runs) for gpu, runs in made.items())


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


def _in_full(gpu: str, runs: Runs) -> str:
    return references.text([references.table(rows, f"cells_{gpu}") for rows in runs])


def _short(gpu: str, runs: Runs) -> str:
    """A line for each dtype, head_dim and mask."""
    of_kind = {_kind(rows): cells for rows in runs if (cells := best(rows))}
    lengths = sorted({seqlen for cells in of_kind.values() for seqlen in cells})
    made = []
    for kind, cells in of_kind.items():
        mean = math.exp(fmean(math.log(cell.ratio) for cell in cells.values()))
        line = [f"{cells[seqlen].ratio:.2f}" if seqlen in cells else "" for seqlen in lengths]
        made.append([kind, *line, formats.bold(f"{mean:.2f}")])
    rows = pd.concat(runs)
    return render(
        "cells.md.j2",
        gpu=load_gpu(gpu).title,
        rungs=sorted({cell.rung for cells in of_kind.values() for cell in cells.values()}),
        days=sorted({str(time)[:10] for time in rows["time"]}),
        shapes=sorted({(row.num_heads, row.batch * row.seqlen_q) for row in rows.itertuples()}),
        official={
            dtype: [title for name, title in baselines.titles().items() if name in set(of_dtype["version"])]
            for dtype, of_dtype in rows.groupby("dtype", sort=False)
        },
        columns=["S", *numbers(*lengths, "mean")],
        rows=made,
    )


def _kind(rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    return f"{first['dtype']}, d{first['head_dim']}{', causal' if first['causal'] else ''}"
