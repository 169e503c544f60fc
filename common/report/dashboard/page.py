"""The HTML page: one file that works without a network, in light and dark."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd
from markupsafe import Markup

from flashladder.common import catalog
from flashladder.common.paths import PUBLISHED
from flashladder.common.records import ladders
from flashladder.common.records.records import bounds
from flashladder.common.report import formats, templating
from flashladder.common.report.charts import experiments as experiment_charts
from flashladder.common.report.charts import ladder as charts
from flashladder.common.report.charts import theme
from flashladder.common.report.charts.studies import pictures as optuna_pictures
from flashladder.common.report.dashboard import data
from flashladder.common.report.dashboard.data import Results
from flashladder.common.report.dashboard.view import direction, view
from flashladder.common.report.ladder_tables import configuration, registers, step, tile
from flashladder.common.report.pages import references
from flashladder.common.report.pages.documents import PAGE
from flashladder.common.studies.experiments.sweeps import EXPERIMENTS

Group: TypeAlias = "tuple[tuple[str, str], pd.DataFrame]"  # the summary's lines of a GPU and dtype

LATEST_RUNS = 60  # shown
MOST_KINDS = 16  # opcodes in the table of the instruction mix
LARGE_STUDY = 50  # trials of a study that is shown unfolded


def render(results: Results, summary: pd.DataFrame) -> str:
    """The page; `summary` is ladders.summary of the results' ladders."""
    groups = summary.groupby(["gpu", "dtype"], sort=False) if len(summary) else ()
    functions = (step, direction, registers, configuration, tile, problem, page_of, formats.interval, formats.rate)
    studies = {name: trials for name, trials in results.tuning.items() if trials["ratio"].notna().any()}
    return templating.render(
        "dashboard.html.j2",
        **{scheme: Markup(theme.custom_properties(scheme)) for scheme in theme.SCHEMES},
        damaged=[str(damage) for damage in results.damaged],
        views=[
            view(gpu, dtype, lines, results.ladders[gpu]) for (gpu, dtype), lines in _largest_first(results, groups)
        ],
        mixes=[_mix(gpu, counts) for gpu, counts in results.sass.items()],
        studies=[_study(name, trials) for name, trials in studies.items()],
        experiments=[_experiment(name, rows) for name, rows in results.experiments.items()],
        benches={name: references.tables_of_runs(rows, name) for name, rows in results.benches.items()},
        unlogged=[
            name for name in catalog.ladders()[1:] if name not in results.benches and catalog.ladder_of(name).launches
        ],
        references=references.every_table(results.references),
        runs=_runs(results),
        **{function.__name__: function for function in (*functions, pd.notna)},
    )


def page_of(version: str) -> str:
    """Where a rung's page is, from the folder of results."""
    return Path(os.path.relpath(catalog.directory_of(version) / PAGE, PUBLISHED)).as_posix()


def _largest_first(results: Results, groups: Iterable[Group]) -> list[Group]:
    """The GPU with the most rungs first, of several the one that was measured last."""

    def size(group: Group) -> tuple[int, str]:
        rows = results.ladders[group[0][0]].rows
        return rows["version"].nunique(), str(rows["time"].max())

    return sorted(groups, key=size, reverse=True)


def _mix(gpu: str, counts: pd.DataFrame) -> dict[str, Any]:
    loops = counts.pivot_table(index="version", columns="kind", values="loop", aggfunc="sum", fill_value=0).sort_index()
    kinds = loops.sum().sort_values(ascending=False).index[:MOST_KINDS]
    rows = [{"version": version, "counts": [int(row[kind]) for kind in kinds]} for version, row in loops.iterrows()]
    titles = ladders.titles()
    first = counts[counts["version"].isin([version.name for version in catalog.versions()])]  # others count otherwise
    pictures = {
        name: theme.with_key(charts.mix(table, titles, name), f"mix-{gpu}-{name}", f"Instruction mix, {gpu}, {name}")
        for name, table in data.mixes(first).items()
    }
    return {"gpu": gpu, "pictures": pictures, "kinds": list(kinds), "rows": rows}


def _study(name: str, trials: pd.DataFrame) -> dict[str, Any]:
    measured = trials[trials["ratio"].notna()]
    winner = measured[measured["winner"].eq(True)]
    best = (winner if len(winner) else measured).sort_values("ratio").iloc[-1]
    what = "the winner" if len(winner) else "the best so far"
    ratio = best["ratio"]
    if pd.notna(best["final_ratio"]):  # the finalists are measured once more, and more precisely
        what, ratio = f"{what}, among the finalists,", best["final_ratio"]
    counts = f"{len(trials)} trials of {best['version']}, {len(measured)} measured"
    words = f"{counts}; {what} has the ratio {ratio:.3f}: {best['config'].replace(',', ', ')}"
    svg = theme.with_key(charts.tuning(trials), f"study-{name}", f"Trials of {name}")
    pictures = optuna_pictures(trials)
    return {"name": name, "words": words, "svg": svg, "pictures": pictures, "large": len(trials) >= LARGE_STUDY}


def _experiment(name: str, rows: pd.DataFrame) -> dict[str, Any]:
    experiment, latest = EXPERIMENTS[name], experiment_charts.latest(rows)
    svg = theme.with_key(experiment_charts.DRAW[name](latest), name, experiment.title)
    source = experiment_charts.source(latest)
    return {"title": experiment.title, "text": experiment.text, "source": source, "svg": svg}


def _runs(results: Results) -> list[Any]:
    """The latest rows of all logs of runs, the newest first."""
    logs = (results.runs, results.bench, results.references, *(ladder.rows for ladder in results.ladders.values()))
    rows = pd.concat([frame for frame in logs if len(frame)] or [results.runs])
    return [*rows.sort_values("time", ascending=False, kind="stable").head(LATEST_RUNS).itertuples()]


def problem(row: Any) -> str:
    """The problem of a row, in short."""
    lengths = row.seqlen_q if row.seqlen_q == row.seqlen_k else f"{row.seqlen_q}x{row.seqlen_k}"
    more = (", causal" if row.causal else "") + (", no LSE" if row.lse is False else "")
    more += bounds(row.window_left, row.window_right, row.softcap)
    return f"{row.batch} x {row.num_heads} x {lengths} x {row.head_dim} {row.dtype}{more}"
