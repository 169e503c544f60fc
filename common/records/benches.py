"""What `flashladder bench --log LADDER_GPU` timed of each ladder, and what that comes to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from flashladder.common import catalog
from flashladder.common.records.cell_results import is_of_cell
from flashladder.common.records.ladders import Limits, field_titles, means, titles
from flashladder.common.records.log import Damage
from flashladder.common.records.run_files import read_all
from flashladder.common.records.schemas import BENCH
from flashladder.common.records.slowdowns import completed

KIND = "bench"  # of the summary's lines, beside those of the first ladder's own log
_ALIKE = ["gpu", "dtype", "head_dim", "causal", "run", "version", "config"]  # what a line is of


def read(folder: Path, damaged: list[Damage]) -> dict[str, dict[str, pd.DataFrame]]:
    """By ladder and GPU all rows; damaged ones go to `damaged`."""
    logs = {name: read_all(folder, f"{name}_*", BENCH, damaged) for name in catalog.ladders()}
    return {name: {gpu: completed(frame) for gpu, frame in of_gpus.items()} for name, of_gpus in logs.items()}


def of_shapes(logs: Mapping[str, Mapping[str, pd.DataFrame]]) -> dict[str, pd.DataFrame]:
    """By ladder the rows with figures, with a column for the GPU; those of cells are cell_results.py's."""
    found = {}
    for name, of_gpus in logs.items():
        rows = [frame[~is_of_cell(frame)].assign(gpu=gpu) for gpu, frame in of_gpus.items()]
        if timed := [frame[frame["ratio"].notna()] for frame in rows if frame["ratio"].notna().any()]:
            found[name] = pd.concat(timed)
    return found


def summary(benches: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Lines like those of `ladders.summary`: one for each run, head_dim, mask and kernel of a ladder."""
    rungs, beside, lines = titles(), field_titles(), []
    for rows in benches.values():
        for (gpu, dtype, head_dim, causal, _, version, _), group in rows.groupby(_ALIKE, sort=False):
            rung = catalog.address_of(version) if version in rungs else ""
            line = {"gpu": gpu, "dtype": dtype, "rung": rung, "version": version, "kind": KIND}
            line |= {"title": (rungs | beside).get(version, version), **means(group, Limits.of(gpu))}
            lines.append(line | {"head_dim": head_dim, "causal": causal, "baseline": group["baseline"].iloc[0]})
    return pd.DataFrame(lines)
