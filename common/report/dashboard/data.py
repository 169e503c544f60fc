"""The logs as data frames."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from flashladder.common.records import benches, cell_results, ladders
from flashladder.common.records.cells import Arch, ConfigText, Name, Pairs, PositiveFloat
from flashladder.common.records.ladder_runs import Ladder
from flashladder.common.records.log import Damage, Log, Schema
from flashladder.common.records.run_files import SCRATCH, RunLog, read_all
from flashladder.common.records.schemas import BENCH, EXPERIMENT, RUNS
from flashladder.common.records.slowdowns import completed
from flashladder.common.studies.experiments.sweeps import EXPERIMENTS

# What is read of logs that other tools describe; they have more columns.
TUNING = Schema(
    {
        "trial": int,
        "version": Name,
        "config": ConfigText,
        "verdict": str,
        "reason": str,
        "ratio": PositiveFloat,
        "final_ratio": PositiveFloat,
        "winner": bool,
    },
    ("trial", "version", "config"),
)
SASS = Schema(
    {"version": Name, "config": Pairs, "arch": Arch, "kind": Name, "pipe": Name, "loop": int, "kernel": int},
    ("version", "kind", "loop", "kernel"),
)


@dataclass(frozen=True)
class Results:
    """Everything in a folder of results."""

    ladders: dict[str, Ladder]  # by GPU
    benches: dict[str, pd.DataFrame]  # by ladder, of each that bench timed
    runs: pd.DataFrame
    bench: pd.DataFrame
    references: pd.DataFrame
    cells: dict[str, dict[str, pd.DataFrame]]  # by ladder and GPU: what `bench --cells` timed
    tuning: dict[str, pd.DataFrame]  # by study
    sass: dict[str, pd.DataFrame]  # by GPU: opcode counts of the rungs
    experiments: dict[str, pd.DataFrame]  # by name, those with rows
    damaged: list[Damage]

    @classmethod
    def load(cls, folder: Path) -> Results:
        """Reads the logs of a folder; ResultsError where a file is another table."""
        damaged: list[Damage] = []

        def rows(log: Log | RunLog) -> pd.DataFrame:
            frame, wrong = log.read()
            damaged.extend(wrong)
            return frame

        logs = benches.read(folder, damaged)
        return cls(
            ladders=ladders.read(folder, damaged),
            benches=benches.of_shapes(logs),
            runs=rows(Log(folder / "runs.csv", RUNS)),
            bench=rows(RunLog(folder, SCRATCH, BENCH)),
            references=completed(rows(RunLog(folder, "references", BENCH))),
            cells=cell_results.of_logs(logs),
            tuning={path.stem: rows(Log(path, TUNING)) for path in sorted(folder.glob("tuning/*.csv"))},
            sass=read_all(folder, "sass_*", SASS, damaged),
            experiments={
                name: found
                for name in EXPERIMENTS
                if len(found := rows(RunLog(folder, f"experiments/{name}", EXPERIMENT)))
            },
            damaged=damaged,
        )


PRODUCTS = {"mma.sync": "HMMA", "wgmma": "HGMMA"}  # a wgmma does the work of 8 or 16


def mixes(counts: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Of each rung's main loop the warp instructions for each of its products, by pipe: a row a rung.

    The rungs by the instruction of their products. One that has wgmma is of these, whatever mma.sync a rare way through
    its loop has: that counts as `other`, as what takes an issue slot alone does.
    """
    used = {
        name: set(counts[counts["kind"].eq(kind) & (counts["loop"] > 0)]["version"]) for name, kind in PRODUCTS.items()
    }
    used["mma.sync"] -= used["wgmma"]
    found = {}
    for name, kind in PRODUCTS.items():
        rows = counts[counts["version"].isin(used[name])]
        is_product = rows["kind"] == kind
        pipes = rows["pipe"].where(rows["pipe"].ne("") & (is_product | rows["pipe"].ne("tensor")), "other")
        table = rows.groupby(["version", pipes], sort=False)["loop"].sum().unstack(fill_value=0).sort_index()
        found[name] = table.div(table["tensor"], axis=0) if len(table) else table
    return {name: table for name, table in found.items() if len(table)}
