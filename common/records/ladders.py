"""What the ladder's logs come to: one line for each rung, configuration and dtype."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from flashladder.common import catalog, own
from flashladder.common.catalog import Version
from flashladder.common.compiler.sass.pipes import tensor_peak, throughput
from flashladder.common.errors import ConfigError
from flashladder.common.measure import baselines
from flashladder.common.measure.statistics import Times, geometric_mean
from flashladder.common.problem.config import gpu_names, load_gpu
from flashladder.common.problem.problem import COMPUTE, operation_named
from flashladder.common.records.ladder_runs import FIELD, Ladder, Run
from flashladder.common.records.log import Damage
from flashladder.common.records.records import problem_of
from flashladder.common.records.run_files import read_all
from flashladder.common.records.schemas import LADDER
from flashladder.common.records.slowdowns import completed

_LATEST = (
    *("config", "registers", "spill_store_bytes", "spill_load_bytes"),
    *("run", "time", "commit", "driver", "torch"),
)
BY_LENGTH = "by length"  # who chose a configuration: the tuner, one for each class of lengths
EMPTY = pd.DataFrame(columns=["gpu", "dtype", "version", "kind"])  # of nothing that was measured


def read(folder: Path, damaged: list[Damage]) -> dict[str, Ladder]:
    """By GPU what is shown of its log, of those with figures."""
    logs = read_all(folder, "ladder_*", LADDER, damaged)
    found = {gpu: Ladder.of(completed(frame)) for gpu, frame in logs.items()}
    return {gpu: ladder for gpu, ladder in found.items() if ladder}


@dataclass(frozen=True)
class Limits:
    """What a GPU can do at most, in TFLOP/s and GB/s; mma.sync's part of the peak where it is known."""

    title: str
    peak: float
    mma_sync: float | None
    bandwidth: float

    @classmethod
    def of(cls, gpu: str) -> Limits | None:
        """The limits of a GPU that is described in configs/gpus; None for others."""
        if gpu not in gpu_names():
            return None
        described = load_gpu(gpu)
        rate = throughput(described).get("tensor")
        part = rate.per_clock / tensor_peak(described) if rate else None
        peak = described.dense_bf16_tflops
        return cls(described.title, peak, part * peak if part else None, described.bandwidth_gb_s)


def titles() -> dict[str, str]:
    """The titles of this repository's rungs that are finished, by their names."""
    every = (catalog.versions(ladder=ladder) for ladder in catalog.ladders() if ladder not in own.ladders())
    return {version.name: version.title for rungs in every for version in rungs if not version.draft}


def field_titles() -> dict[str, str]:
    """Those of what stands beside the ladder."""
    references = {reference.name: reference.title for reference in catalog.references()}
    return references | baselines.titles()


def summary(ladders: Mapping[str, Ladder]) -> pd.DataFrame:
    """A line for each GPU, dtype, kind of configuration and rung or kernel of the field: means over the lengths.

    rate is the harmonic mean, in the operation's unit, ratio the geometric mean with its 95 % interval (the lengths'
    intervals are independent, so their logarithms add up in quadrature), of_* are per cent. step is against the rung
    `below`, with its interval, from rounds that both took part in. again is the ratio in a run on another card, gap its
    distance, and recompiled says whether the machine code was another.
    """
    beside, lines = field_titles(), []
    for gpu, ladder in ladders.items():
        limits = Limits.of(gpu)
        for (dtype, kind), group in ladder.rows.groupby(["dtype", "kind"], sort=False):
            found: dict[str, pd.DataFrame] = {}
            for version, rows in group.groupby("version", sort=True):
                rung = "" if kind == FIELD else catalog.address_of(version)
                line = {"gpu": gpu, "dtype": dtype, "rung": rung, "version": version, "kind": kind}
                known = None if kind == FIELD else _rung(version)
                title = known.title if known else beside.get(version, version)
                line |= {"title": title, **means(rows, limits)}
                line |= {"chosen_by": _chosen_by(rows)}
                lines.append(line | _step(_below(known, found), rows) | _again(line, rows, ladder.again))
                if kind != FIELD:
                    found[version] = rows
    order = ["gpu", "dtype", "version"]  # names of the field begin with a letter, so they follow the rungs
    return pd.DataFrame(lines).sort_values(order, kind="stable").reset_index(drop=True) if lines else EMPTY


def _chosen_by(rows: pd.DataFrame) -> str:
    """Who chose the configuration, or BY_LENGTH."""
    several = rows.groupby("run")["config"].nunique().max() > 1
    return BY_LENGTH if several else rows["chosen_by"].iloc[-1] or "default"


def _rung(name: str) -> Version | None:
    """The rung of a log, where it is still there."""
    with suppress(ConfigError):
        return catalog.find(name)
    return None


def _below(rung: Version | None, found: Mapping[str, pd.DataFrame]) -> pd.DataFrame | None:
    """The rows that a step begins at: those of the rung's parent, or of the rung measured before it."""
    if rung and rung.parent and (parent := rung.below()):
        return found.get(parent.name)
    return [*found.values()][-1] if found else None


def field(lines: pd.DataFrame) -> pd.DataFrame:
    """The lines of what stands beside the ladder, the fastest first."""
    return lines[lines["kind"] == FIELD].sort_values("ratio", ascending=False, kind="stable")


def _step(below: pd.DataFrame | None, rows: pd.DataFrame) -> dict[str, Any]:
    """What a rung gains on the one below; nothing where no run timed both in the same rounds."""
    pairs = [] if below is None else _pairs(below, rows)
    if below is None or not pairs:
        return {"below": "", "step": np.nan, "step_low": np.nan, "step_high": np.nan}
    step = geometric_mean(pairs)
    return {"below": below["version"].iloc[0], "step": step.value, "step_low": step.low, "step_high": step.high}


def _pairs(below: pd.DataFrame, rows: pd.DataFrame) -> list[tuple[Times, Times]]:
    """Of each length that one run timed both at, the times of its rounds."""
    both = below.merge(rows, on=["run", "seqlen_q"], suffixes=("_below", ""))
    times = [[np.array(row.split(), float) for row in both[name]] for name in ("round_us_below", "round_us")]
    return [pair for pair in zip(*times, strict=True) if 0 < len(pair[0]) == len(pair[1])]


def _again(line: Mapping[str, Any], ours: pd.DataFrame, again: Run | None) -> dict[str, Any]:
    """The same line's ratio in a run on another card."""
    if again is None:
        return {"again": np.nan, "gap": np.nan, "recompiled": False}
    alike = [again.rows[column] == line[column] for column in ("dtype", "kind", "version")]
    rows = again.rows[np.logical_and.reduce(alike)]
    ratio = means(rows, None)["ratio"] if len(rows) else np.nan
    recompiled = set(rows["code"]) != set(ours["code"])
    return {"again": ratio, "gap": ratio / line["ratio"] - 1, "recompiled": recompiled}


def gap(row: Any) -> str:
    """How far a line's ratio is from that on another card, in words."""
    return f"{100 * row.gap:+.1f} %" + ", other code" * row.recompiled


def means(rows: pd.DataFrame, limits: Limits | None) -> dict[str, Any]:
    """What the rows of one kernel come to, over the sequence lengths."""
    rates, unit = _rates(rows)
    rate = _harmonic(rates)
    of_what = limits if unit == COMPUTE else None
    ratio, low, high = mean_ratio(rows)
    return {
        "lengths": len(rows),
        "unit": unit,
        "rate": rate,
        "official_rate": _harmonic(rates * rows["time_us"] / rows["baseline_us"]),
        "ratio": ratio,
        "ratio_low": low,
        "ratio_high": high,
        "of_mma_sync": 100 * rate / of_what.mma_sync if of_what and of_what.mma_sync else None,
        "of_peak": 100 * rate / of_what.peak if of_what else None,
        **{name: rows[name].iloc[-1] for name in _LATEST},
    }


def _rates(rows: pd.DataFrame) -> tuple[pd.Series[float], str]:
    """How fast the rows of one operation were, in its unit."""
    operations = [*filter(None, rows["operation"].dropna()), own.FIRST]  # older rows have none
    unit = operation_named(operations[0]).unit
    if unit == COMPUTE:
        return rows["tflops"], unit
    rates = [problem_of(row).rate(row["time_us"]) for row in rows.to_dict("records")]
    return pd.Series(rates, rows.index), unit


def mean_ratio(rows: pd.DataFrame) -> tuple[float, float, float]:
    """The geometric mean of the rows' ratios with its 95 % interval: theirs are independent."""
    logarithms = np.log(rows["ratio"])
    below = _quadrature(logarithms - np.log(rows["ratio_low"]))
    above = _quadrature(np.log(rows["ratio_high"]) - logarithms)
    mean = logarithms.mean()
    return float(np.exp(mean)), float(np.exp(mean - below)), float(np.exp(mean + above))


def _harmonic(rates: pd.Series[float]) -> float:
    return float(len(rates) / (1 / rates).sum())


def _quadrature(widths: pd.Series[float]) -> float:
    return float(np.sqrt((widths**2).sum()) / len(widths))
