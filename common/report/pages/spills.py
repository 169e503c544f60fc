"""The page on register spills: what the tiles of 128 rows spill, and what level 1 of ptxas makes of it.

The machine code is read off kernels compiled here; the ratios are those of the tuner's studies at both levels.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from flashladder.common import catalog
from flashladder.common.catalog import PTXAS_LEVEL, Version
from flashladder.common.compiler import BuildRequest, build
from flashladder.common.compiler.sass import read
from flashladder.common.errors import ResultsError
from flashladder.common.paths import ROOT, VERSIONS
from flashladder.common.problem.config import parse_values
from flashladder.common.problem.problem import Problem
from flashladder.common.report import formats
from flashladder.common.report.sections import Section, compiler
from flashladder.common.report.tables import markdown, numbers

PAGE = VERSIONS / "SPILLS.md"
MARKER = "spills"
ARCH = "sm_90a"
STUDY = "at-o1-{}"  # the tuner's, of one rung with ptxas_level=1,3
PROBLEM = Problem(num_heads=16)  # the ladder's
USUAL, LOW = 3, 1  # levels of ptxas
FIGURES = {  # of the machine code, and their heads in the table
    "spill stores and loads, bytes": "spilled, bytes",
    "local accesses in the loop": "local accesses in the loop",
    "instructions in the main loop": "instructions in the loop",
    "cycles to issue the loop, one warp": "cycles to issue it",
}


def section() -> Section:
    """The tables on the page."""
    return Section(PAGE, MARKER, text)


def requests() -> list[BuildRequest]:
    """The kernels that the page compares: each rung's default at both levels."""
    return [
        BuildRequest(version, version.config_for(PROBLEM, **{PTXAS_LEVEL: level}), ARCH)
        for version in rungs()
        for level in (USUAL, LOW)
    ]


def rungs() -> list[Version]:
    """Those that the tuner has searched at both levels."""
    return [version for version in catalog.versions() if _study(version).exists()]


def text() -> str:
    """The tables, in Markdown. Raises what building and disassembling raise."""
    made = f"Made by `flashladder evidence` with ptxas {compiler()}, and from results/tuning/{STUDY.format('*')}."
    return "\n\n".join([_machine_code(), measured(), made])


def _machine_code() -> str:
    figures = [read(artifact).figures() for artifact in build(requests())]
    rows = [
        (version.number, *(f"{usual[name]:,} → {low[name]:,}" for name in FIGURES))
        for version, usual, low in zip(rungs(), figures[::2], figures[1::2], strict=True)
    ]
    return markdown([f"{ARCH}, -O{USUAL} → -O{LOW}", *numbers(*FIGURES.values())], rows)


def measured() -> str:
    """The ratios to FlashAttention-2 that the tuner measured."""
    rows = []
    for version in rungs():
        trials = pd.read_csv(_study(version)).dropna(subset=["ratio"])
        low = trials[trials["config"].str.endswith(f"{PTXAS_LEVEL}={LOW}")]
        best = low.loc[low["ratio"].idxmax()]
        fields = parse_values(best["config"])
        ratios = [*(_of_default(version, trials, level) for level in (USUAL, LOW)), best["ratio"]]
        rows.append((version.number, *map(formats.ratio, ratios), f"{fields['k_fragments']}, {fields['v_fragments']}"))
    heads = ("default", f"default, -O{LOW}", f"best at -O{LOW}", "its K, V")
    return markdown(["ratio to FlashAttention-2", *numbers(*heads)], rows)


def _of_default(version: Version, trials: pd.DataFrame, level: int) -> float:
    """The ratio of a rung's default at a level; configurations of the same machine code are one trial."""
    default = version.config(**{PTXAS_LEVEL: level}).as_dict()
    for trial in trials.itertuples():
        alike = [trial.config, *(trial.same_code.split(";") if isinstance(trial.same_code, str) else [])]
        if any(parse_values(config).items() <= default.items() for config in alike):
            return float(trial.ratio)
    raise ResultsError(f"{_study(version)} has no trial of {version.name}'s default at {PTXAS_LEVEL}={level}")


def _study(version: Version) -> Path:
    return ROOT / "results" / "tuning" / f"{STUDY.format(version.name)}.csv"
