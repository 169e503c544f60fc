"""What the ladder's logs come to: one line for each rung, configuration and dtype."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from flashladder.common import catalog
from flashladder.common.config import gpu_names, load_gpu
from flashladder.common.results.log import Damage, read_all
from flashladder.common.results.records import LADDER
from flashladder.common.sass.pipes import tensor_peak, throughput

_ROW = ["version", "kind", "dtype", "seqlen_q"]  # of several measurements of one thing the latest counts
_LATEST = ("config", "registers", "spill_store_bytes", "spill_load_bytes", "time", "commit", "driver", "torch")
EMPTY = pd.DataFrame(columns=["gpu", "dtype", "version"])  # of nothing that was measured


def read(folder: Path, damaged: list[Damage]) -> dict[str, pd.DataFrame]:
    """By GPU: the latest row of each rung, kind of configuration, dtype and length."""
    return {gpu: _latest(frame) for gpu, frame in read_all(folder, "ladder_*.csv", LADDER, damaged).items()}


def _latest(frame: pd.DataFrame) -> pd.DataFrame:
    """The timed rows, of several of one thing the latest; a rung counts when its own configuration was timed."""
    timed = frame[frame["time_us"].notna() & frame["ratio"].notna()]
    rows = timed.drop_duplicates(_ROW, keep="last").sort_values(_ROW, kind="stable")
    complete = rows.groupby(["dtype", "version"])["kind"].transform(lambda kinds: "own" in set(kinds))
    return rows[complete.astype(bool)].reset_index(drop=True)


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
    """The titles of all ladders' rungs, by their names."""
    every = (catalog.versions(ladder=ladder) for ladder in catalog.ladders())
    return {version.name: version.title for rungs in every for version in rungs}


def summary(ladders: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """A line for each GPU, dtype, rung and kind of configuration: means over the sequence lengths.

    tflops is the harmonic mean, ratio the geometric mean with its 95 % interval (the lengths' intervals are
    independent, so their logarithms add up in quadrature), of_* are per cent, step is against the rung below.
    """
    names = titles()
    lines = []
    for gpu, ladder in ladders.items():
        limits = Limits.of(gpu)
        groups = ladder.groupby(["dtype", "version", "kind"], sort=False)
        for (dtype, version, kind), rows in groups:
            line = {"gpu": gpu, "dtype": dtype, "rung": catalog.address_of(version), "version": version, "kind": kind}
            lines.append(line | {"title": names.get(version, version)} | means(rows, limits))
    return _with_steps(pd.DataFrame(lines).sort_values(["gpu", "dtype", "version"], kind="stable")) if lines else EMPTY


def _with_steps(summary: pd.DataFrame) -> pd.DataFrame:
    """Adds what each rung gains on the one below, and whether the two intervals are apart."""
    below = summary.groupby(["gpu", "dtype", "kind"], sort=False)[["ratio", "ratio_low", "ratio_high"]].shift()
    apart = (summary["ratio_low"] > below["ratio_high"]) | (summary["ratio_high"] < below["ratio_low"])
    return summary.assign(step=summary["ratio"] / below["ratio"], step_is_clear=apart).reset_index(drop=True)


def means(rows: pd.DataFrame, limits: Limits | None) -> dict[str, Any]:
    """What the rows of one kernel come to, over the sequence lengths."""
    logarithms = np.log(rows["ratio"])
    tflops = _harmonic(rows["tflops"])
    return {
        "lengths": len(rows),
        "tflops": tflops,
        "official_tflops": _harmonic(rows["tflops"] * rows["time_us"] / rows["baseline_us"]),
        "ratio": float(np.exp(logarithms.mean())),
        "ratio_low": float(np.exp(logarithms.mean() - _quadrature(logarithms - np.log(rows["ratio_low"])))),
        "ratio_high": float(np.exp(logarithms.mean() + _quadrature(np.log(rows["ratio_high"]) - logarithms))),
        "of_mma_sync": 100 * tflops / limits.mma_sync if limits and limits.mma_sync else None,
        "of_peak": 100 * tflops / limits.peak if limits else None,
        **{name: rows[name].iloc[-1] for name in _LATEST},
    }


def _harmonic(rates: pd.Series[float]) -> float:
    return float(len(rates) / (1 / rates).sum())


def _quadrature(widths: pd.Series[float]) -> float:
    return float(np.sqrt((widths**2).sum()) / len(widths))
