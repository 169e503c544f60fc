"""The runs of the ladder's log, and which of their rows are shown.

A run is one process of `flashladder ladder` on one card, or several that took up one another, each on a card of this
kind. The contenders of a length take part in the same rounds on one card, so that their times can be paired; those of
two runs cannot. What is shown is therefore one run: the largest whose GPU was not slowed
by heat, of several the latest. Logs from before rounds were kept are joined, the latest row of each rung, and nothing
is paired there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from flashladder.common import catalog
from flashladder.common.records.slowdowns import SLOWDOWN_SHARES

OWN, FIXED, FIELD = "own", "fixed", "field"  # kinds of rows
MOST_THERMAL = 0.03  # of a run's samples: what is slower for heat says nothing of the kernels
ROW = ["version", "kind", "dtype", "seqlen_q"]  # of several measurements of one thing the latest counts
_SHAPE = ["dtype", "seqlen_q"]


@dataclass(frozen=True, eq=False)
class Run:
    """The timed rows of one run."""

    rows: pd.DataFrame

    def __str__(self) -> str:
        last = self.rows[self.rows["kind"] != FIELD].iloc[-1]
        software = f"driver {last['driver']}, torch {last['torch']}, CUDA {last['toolkit']}"
        return f"{self.name} on {last['device']}, {self.card}; {software}, {last['time'][:10]}; {self.slowed}"

    @property
    def card(self) -> str:
        """Which card, or cards, and which commit ran there."""
        commit = self.rows["commit"].iloc[-1]
        several = "s" if len(self.gpu_ids) > 1 else ""
        each = ", each length on one" if several else ""
        ran = f", commit {commit}" if isinstance(commit, str) and commit else ""
        return f"card{several} {' and '.join(self.gpu_ids)}{each}{ran}"

    @property
    def name(self) -> str:
        """By which the tool calls it."""
        return str(self.rows["run"].iloc[0])

    @property
    def gpu_ids(self) -> tuple[str, ...]:
        """Tell cards apart: hashes of the UUIDs."""
        return tuple(map(str, self.rows["gpu_id"].unique()))

    @property
    def keeps_rounds(self) -> bool:
        """Whether its times can be paired."""
        return bool(self.rows["round_us"].ne("").any())

    @cached_property
    def cells(self) -> set[tuple[object, ...]]:
        """The rungs that it has of those that there are, each with its dtypes and lengths."""
        known = {name for ladder in catalog.ladders() for name in catalog.rung_names(ladder=ladder)}
        own = self.rows[(self.rows["kind"] == OWN) & self.rows["version"].isin(known)]
        return set(own[["version", *_SHAPE]].itertuples(index=False, name=None))

    def share(self, column: str) -> float | None:
        """The share of all its samples in which something slowed the GPU; None where that was not recorded."""
        shapes = self.rows.drop_duplicates(_SHAPE).dropna(subset=[column])
        if shapes.empty:
            return None
        return float(np.average(shapes[column], weights=shapes["samples"].fillna(shapes["rounds"]).astype(float)))

    @property
    def is_hot(self) -> bool:
        """Whether heat slowed the GPU in so many samples that the figures are not to be published."""
        return (self.share("thermal_share") or 0) > MOST_THERMAL

    @property
    def slowed(self) -> str:
        """How often what slowed the GPU, in words."""
        power, thermal, other = (self.share(column) for column in SLOWDOWN_SHARES)
        if power is None or thermal is None or other is None:
            return "what slowed it was not recorded"
        words = ("of samples at the power cap", "slowed by heat", "by something else")
        shares = zip((power, thermal, other), words, strict=True)
        return ", ".join(f"{100 * share:.0f} % {word}" for share, word in shares)


@dataclass(frozen=True, eq=False)
class Ladder:
    """The rows of a GPU that are shown, and of which runs they are."""

    rows: pd.DataFrame
    runs: tuple[Run, ...]  # one, unless they are joined
    again: Run | None  # the same rungs on another card
    hot: tuple[Run, ...]  # whose rows are left out, since heat slowed the GPU

    @property
    def is_one_run(self) -> bool:
        """Whether its rows can be paired."""
        return len(self.runs) == 1 and self.runs[0].keeps_rounds

    @property
    def source(self) -> str:
        """Of which runs it is, in sentences."""
        if self.is_one_run:
            return f"One run: {self.runs[0]}." + (f" On another card: {self.again}." if self.again else "")
        cards = len({card for run in self.runs for card in run.gpu_ids})
        parts = "; ".join(f"{', '.join(self._rungs(run))}: {run.name} ({run.card}; {run.slowed})" for run in self.runs)
        left_out = [f"{run.name} ({run.card}; {run.slowed})" for run in self.hot]
        heat = f" Left out, since heat slowed the GPU: {'; '.join(left_out)}." if left_out else ""
        return f"Joined of {len(self.runs)} runs on {cards} cards, so that there are no steps. Rungs {parts}.{heat}"

    def _rungs(self, run: Run) -> list[str]:
        """Those that are shown of a run: 00 to 16, 18."""
        mine = self.rows[(self.rows["run"] == run.name) & (self.rows["kind"] == OWN)]
        stretches: list[list[int]] = []
        for rung in sorted({int(catalog.address_of(version)[-2:]) for version in mine["version"]}):
            if stretches and rung == stretches[-1][-1] + 1:
                stretches[-1].append(rung)
            else:
                stretches.append([rung])
        return [f"{s[0]:02}" + (f" to {s[-1]:02}" if len(s) > 1 else "") for s in stretches]

    @classmethod
    def of(cls, frame: pd.DataFrame, name: str | None = None) -> Ladder | None:
        """What of a log is shown, or of the run of this name, hot or not; None where nothing was timed."""
        runs = runs_of(frame)
        if name is not None and name not in {run.name for run in runs}:
            return None
        hot = tuple(run for run in runs if run.is_hot)
        cool = [run for run in runs if not run.is_hot]
        paired = [run for run in cool if run.keeps_rounds] if name is None else [r for r in runs if r.name == name]
        if paired:
            first = _largest(paired)
            alike = [run for run in cool if run.keeps_rounds and run.cells >= first.cells]
            others = [run for run in alike if not {*run.gpu_ids} & {*first.gpu_ids}]
            again = Run(best_as_own(_largest(others).rows)) if others else None
            return cls(best_as_own(first.rows), (first,), again, hot)
        if not cool:
            return None
        rows = pd.concat([run.rows for run in cool]).drop_duplicates(ROW, keep="last")
        shown = [run for run in cool if run.name in set(rows["run"])]
        return cls(best_as_own(rows), tuple(shown), None, hot)


def runs_of(frame: pd.DataFrame) -> list[Run]:
    """The runs of a log in its order, without rows that have no figures; a rung counts when its own configuration was
    timed."""
    words = {
        name: frame[name].astype(object).fillna("") for name in ("chosen_by", "round_us")
    }  # younger than some logs
    timed = frame.assign(**words)[frame["time_us"].notna() & frame["ratio"].notna()]
    latest = timed.drop_duplicates(["run", *ROW], keep="last")
    has_own = latest.groupby(["run", "dtype", "version"])["kind"].transform(lambda kinds: OWN in set(kinds))
    whole = latest[has_own.astype(bool) | (latest["kind"] == FIELD)]
    return [Run(rows) for _, rows in whole.groupby("run", sort=False)]


def best_as_own(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows in order, where a rung that was faster in the fixed configuration has that as its own: a rung's best is
    never below what was measured of it."""
    shown = []
    for _, group in rows.sort_values(ROW, kind="stable").groupby(["version", "dtype"], sort=False):
        own, fixed = group[group["kind"] == OWN], group[group["kind"] == FIXED]
        if _mean(fixed, own) > _mean(own, fixed):
            own = fixed.assign(kind=OWN, chosen_by=FIXED)
        shown += [group[group["kind"] == FIELD], fixed, own]
    return pd.concat(shown).reset_index(drop=True)


def _mean(rows: pd.DataFrame, others: pd.DataFrame) -> float:
    """The mean ratio (geometric) over the lengths that the others have too; 0 where there are none."""
    both = rows[rows["seqlen_q"].isin(others["seqlen_q"])]
    return float(np.exp(np.log(both["ratio"]).mean())) if len(both) else 0.0


def _largest(runs: Sequence[Run]) -> Run:
    """The run with the most rungs, dtypes and lengths, of several the latest."""
    return max(runs, key=lambda run: (len(run.cells), run.rows["time"].max()))
