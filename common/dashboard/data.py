"""The logs as data frames, and what they come to: one line for each rung, configuration and dtype."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from flashladder.common import catalog
from flashladder.common.config import gpu_names, load_gpu
from flashladder.common.experiments.plan import EXPERIMENTS
from flashladder.common.records import BENCH, EXPERIMENT, LADDER, RUNS, ConfigText
from flashladder.common.results import Damage, Log, PositiveFloat, Schema
from flashladder.common.sass.pipes import tensor_peak, throughput

# What is read of logs that other tools describe; they have more columns.
TUNING = Schema(
    {
        "trial": int,
        "version": str,
        "config": ConfigText,
        "verdict": str,
        "reason": str,
        "ratio": PositiveFloat,
        "final_ratio": PositiveFloat,
        "winner": bool,
    }
)
SASS = Schema({"version": str, "config": str, "arch": str, "kind": str, "pipe": str, "loop": int, "kernel": int})

_ROW = ["version", "kind", "dtype", "seqlen_q"]  # of several measurements of one thing the latest counts
_LATEST = ("config", "registers", "spill_store_bytes", "spill_load_bytes", "time", "commit", "driver", "torch")
EMPTY = pd.DataFrame(columns=["gpu", "dtype", "version"])  # of nothing that was measured


@dataclass(frozen=True)
class Results:
    """Everything in a folder of results."""

    ladders: dict[str, pd.DataFrame]  # by GPU: the latest row of each rung, kind of configuration, dtype and length
    runs: pd.DataFrame
    bench: pd.DataFrame
    references: pd.DataFrame
    tuning: dict[str, pd.DataFrame]  # by study
    sass: dict[str, pd.DataFrame]  # by GPU: opcode counts of the rungs
    experiments: dict[str, pd.DataFrame]  # by name, those with rows
    damaged: list[Damage]

    @classmethod
    def load(cls, folder: Path) -> Results:
        """Reads the logs of a folder; ResultsError where a file is another table."""
        damaged: list[Damage] = []

        def read(path: Path, schema: Schema) -> pd.DataFrame:
            frame, wrong = Log(path, schema).read()
            damaged.extend(wrong)
            return frame

        def read_all(pattern: str, schema: Schema) -> dict[str, pd.DataFrame]:
            paths = sorted(folder.glob(pattern))
            return {path.stem.removeprefix(pattern.partition("*")[0]): read(path, schema) for path in paths}

        return cls(
            ladders={gpu: _latest(frame) for gpu, frame in read_all("ladder_*.csv", LADDER).items()},
            runs=read(folder / "runs.csv", RUNS),
            bench=read(folder / "bench.csv", BENCH),
            references=read(folder / "references.csv", BENCH),
            tuning={path.stem: read(path, TUNING) for path in sorted(folder.glob("tuning/*.csv"))},
            sass=read_all("sass_*.csv", SASS),
            experiments={
                name: rows
                for name in EXPERIMENTS
                if len(rows := read(folder / "experiments" / f"{name}.csv", EXPERIMENT))
            },
            damaged=damaged,
        )


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
    """The rungs' titles, by their names."""
    return {version.name: version.title for version in catalog.versions()}


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
            line = {"gpu": gpu, "dtype": dtype, "rung": version[:2], "version": version, "kind": kind}
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


def mix(counts: pd.DataFrame) -> pd.DataFrame:
    """Of each rung's main loop the warp instructions for each mma, by pipe: a row a rung, rungs without mma left out.

    What takes an issue slot alone counts as `other`.
    """
    pipes = counts["pipe"].where(counts["pipe"] != "", "other")
    table = counts.groupby(["version", pipes], sort=False)["loop"].sum().unstack(fill_value=0)
    if "tensor" not in table:
        return table.iloc[:0]
    table = table[table["tensor"] > 0].sort_index()
    return table.div(table["tensor"], axis=0)
