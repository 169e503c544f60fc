"""What `flashladder bench --cells` logged of a ladder on a GPU: of each cell the latest run, and what that comes to.

A ratio is the time of the fastest official kernel over a rung's: both were timed in the same rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

import pandas as pd

from flashladder.common.measure import baselines
from flashladder.common.problem.problem import COMPUTE, operation_named

FASTEST = "fastest rung"  # in the place of a rung: of each cell the one with the least time
_PLACE = ["group", "case", "causal", "size"]


@dataclass(frozen=True)
class CellResult:
    """The times of a cell's kernels in microseconds, and the figures that tables show, by baseline or rung: TFLOP/s, or
    times again of what memory bounds."""

    group: str
    case: str
    causal: bool
    size: str  # a length, or a mix of lengths
    times: Mapping[str, float]
    figures: Mapping[str, float]
    unit: str = COMPUTE

    @property
    def mask(self) -> str:
        """In a word."""
        return "causal" if self.causal else "full"

    @property
    def official(self) -> str:
        """The fastest of the official kernels; empty where none was timed."""
        known = baselines.titles()
        return min((name for name in self.times if name in known), key=self.times.__getitem__, default="")

    @property
    def rung(self) -> str:
        """The fastest of ours; empty where none was timed."""
        known = baselines.titles()
        return min((name for name in self.times if name not in known), key=self.times.__getitem__, default="")

    def ratio(self, kernel: str = FASTEST) -> float | None:
        """Of a kernel, or of the fastest rung; None where it was not timed, or no official one was."""
        name = self.rung if kernel == FASTEST else kernel
        return self.times[self.official] / self.times[name] if self.official and name in self.times else None


@dataclass(frozen=True)
class Ratios:
    """Of a kernel in some cells: how many there are, their geometric mean, and the least with its cell."""

    count: int
    mean: float
    least: float
    worst: CellResult


def of_logs(logs: Mapping[str, Mapping[str, pd.DataFrame]]) -> dict[str, dict[str, pd.DataFrame]]:
    """By ladder and GPU the rows of cells in what was logged, where there are any."""
    found = {
        ladder: {gpu: rows for gpu, frame in of_gpus.items() if len(rows := latest(frame))}
        for ladder, of_gpus in logs.items()
    }
    return {ladder: of_gpus for ladder, of_gpus in found.items() if of_gpus}


def is_of_cell(rows: pd.DataFrame) -> pd.Series[bool]:
    """Which rows are of a cell."""
    return rows["group"].notna() & rows["group"].ne("")


def latest(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each cell the timed rows of its latest run, with a column for the size."""
    timed = rows[is_of_cell(rows) & rows["time_us"].notna()]
    is_packed = timed["mix"].notna() & timed["mix"].ne("")
    longest = timed[["seqlen_q", "seqlen_k"]].max(axis=1)
    timed = timed.assign(size=timed["mix"].where(is_packed, longest.astype(str)))
    order = timed.sort_values("time", kind="stable")
    return timed[timed["run"] == order.groupby(_PLACE)["run"].transform("last").reindex(timed.index)]


def results(rows: pd.DataFrame) -> list[CellResult]:
    """The cells of rows that `latest` gave, in their order."""
    found = []
    for (group, case, causal, size), of_cell in rows.groupby(_PLACE, sort=False):
        fastest = of_cell.sort_values("time_us", kind="stable").drop_duplicates("version").sort_index()
        is_compute = operation_named(str(fastest["operation"].iloc[0])).unit == COMPUTE
        column, unit = ("tflops", COMPUTE) if is_compute else ("time_us", "us")
        times, figures = (dict(zip(fastest["version"], fastest[name], strict=True)) for name in ("time_us", column))
        found.append(CellResult(str(group), str(case), bool(causal), str(size), times, figures, unit))
    return found


def kernels(cells: Sequence[CellResult]) -> list[str]:
    """Those that were timed in some cells: official ones as baselines are listed, then rungs by their numbers."""
    timed = {name for cell in cells for name in cell.times}
    return [*(name for name in baselines.titles() if name in timed), *sorted(timed - baselines.titles().keys())]


def ratios(cells: Sequence[CellResult], kernel: str = FASTEST) -> Ratios | None:
    """Of a kernel, or of the fastest rungs; None where no cell has a ratio of it."""
    found = [(ratio, cell) for cell in cells if (ratio := cell.ratio(kernel)) is not None]
    if not found:
        return None
    least, worst = min(found, key=lambda pair: pair[0])
    return Ratios(len(found), geometric_mean(ratio for ratio, _ in found), least, worst)


def beside(cells: Sequence[CellResult], official: str) -> float | None:
    """How many times as fast as an official kernel the fastest rung is: the geometric mean over cells with both."""
    found = [cell.times[official] / cell.times[cell.rung] for cell in cells if cell.rung and official in cell.times]
    return geometric_mean(found) if found else None
