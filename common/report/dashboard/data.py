"""The logs as data frames."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from flashladder.common.records import ladders
from flashladder.common.records.ladder_runs import Ladder
from flashladder.common.records.log import Damage, Log, PositiveFloat, Schema, read_all
from flashladder.common.records.schemas import BENCH, EXPERIMENT, RUNS, ConfigText
from flashladder.common.records.slowdowns import completed
from flashladder.common.studies.experiments.sweeps import EXPERIMENTS

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


@dataclass(frozen=True)
class Results:
    """Everything in a folder of results."""

    ladders: dict[str, Ladder]  # by GPU
    runs: pd.DataFrame
    bench: pd.DataFrame
    references: pd.DataFrame
    cells: dict[str, pd.DataFrame]  # by GPU: rungs beside the field, of each head_dim, mask and length
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

        return cls(
            ladders=ladders.read(folder, damaged),
            runs=read(folder / "runs.csv", RUNS),
            bench=read(folder / "bench.csv", BENCH),
            references=completed(read(folder / "references.csv", BENCH)),
            cells={gpu: completed(rows) for gpu, rows in read_all(folder, "cells_*.csv", BENCH, damaged).items()},
            tuning={path.stem: read(path, TUNING) for path in sorted(folder.glob("tuning/*.csv"))},
            sass=read_all(folder, "sass_*.csv", SASS, damaged),
            experiments={
                name: rows
                for name in EXPERIMENTS
                if len(rows := read(folder / "experiments" / f"{name}.csv", EXPERIMENT))
            },
            damaged=damaged,
        )


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
