"""How much longer a call with an option takes, by logs that have it beside the same call without one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from flashladder.common.catalog import kind_of
from flashladder.common.problem.families import NORMAL
from flashladder.common.problem.problem import Problem
from flashladder.common.records import records
from flashladder.common.records.run_files import read_all
from flashladder.common.records.schemas import BENCH

LOGS = ("backward", "bounds", "cells", "column_of_ones", "decode", "every_width", "families")  # of `flashladder bench`
Times = dict[str, dict[tuple[str, str, Problem], float]]  # by rung; and by run, mode and problem


def measured(folder: Path) -> Times:
    """The times of normal inputs in a folder's logs; of a rung that a run timed twice, the shorter one."""
    times: Times = {}
    for rows in (rows for name in LOGS for rows in read_all(folder, f"{name}_*", BENCH, []).values()):
        rows = rows[rows["time_us"].notna() & rows["family"].eq(NORMAL) & rows["version"].str.contains(r"\d\d_")]
        for row in rows.to_dict("records"):
            of_rung, key = times.setdefault(row["version"], {}), (row["run"], row["mode"], records.problem_of(row))
            of_rung[key] = min(of_rung.get(key, math.inf), row["time_us"])
    return times


def factor(plain: Problem, fields: Mapping[str, Any], rungs: tuple[str, str], times: Times) -> float | None:
    """The time with an option over that without, each by its rung: the mean of the latest run that has both.

    None where no run has; and of packed sequences, whose like without packing is other work.
    """
    if "seqlens_q" in fields or not fields:
        return None
    before, own = (times.get(rung, {}) for rung in rungs)
    kind, found = kind_of(plain).any_size, dict[str, list[float]]()
    for (run, mode, problem), time in before.items():
        if problem.head_dim == plain.head_dim and kind_of(problem).any_size == kind:
            also = own.get((run, mode, replace(problem, **fields)))
            found.setdefault(run, []).extend([also / time] if also else [])
    of_latest = max(((run, ratios) for run, ratios in found.items() if ratios), default=("", []))[1]
    return math.exp(fmean(map(math.log, of_latest))) if of_latest else None
