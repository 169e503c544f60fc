"""The HTML page: one file that works without a network, in light and dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from flashladder.common.records import ladders
from flashladder.common.records.records import bounds
from flashladder.common.report import experiments as experiment_figures
from flashladder.common.report import theme
from flashladder.common.report.dashboard import data, figures, references
from flashladder.common.report.dashboard.data import Results
from flashladder.common.report.dashboard.studies import pictures as optuna_pictures
from flashladder.common.report.dashboard.view import view
from flashladder.common.report.display import rate
from flashladder.common.report.ladder_tables import tile
from flashladder.common.studies.experiments.sweeps import EXPERIMENTS

HERE = Path(__file__).parent
LATEST_RUNS = 60  # shown
MOST_KINDS = 16  # opcodes in the table of the instruction mix
LARGE_STUDY = 50  # trials of a study that is shown unfolded


def render(results: Results, summary: pd.DataFrame) -> str:
    """The page; `summary` is ladders.summary of the results' ladders."""
    loader = jinja2.FileSystemLoader(HERE)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    groups = summary.groupby(["gpu", "dtype"], sort=False) if len(summary) else ()
    studies = {name: trials for name, trials in results.tuning.items() if trials["ratio"].notna().any()}
    return environment.get_template("page.html").render(
        **{scheme: Markup(theme.custom_properties(scheme)) for scheme in theme.SCHEMES},
        css=_asset("page.css"),
        js=_asset("page.js"),
        damaged=[str(damage) for damage in results.damaged],
        views=[view(gpu, dtype, lines, results.ladders[gpu]) for (gpu, dtype), lines in groups],
        mixes=[_mix(gpu, counts) for gpu, counts in results.sass.items()],
        studies=[_study(name, trials) for name, trials in studies.items()],
        experiments=[_experiment(name, rows) for name, rows in results.experiments.items()],
        references=references.every_table(results.references),
        runs=_runs(results),
    )


def _asset(name: str) -> Markup:
    return Markup((HERE / name).read_text())


def _mix(gpu: str, counts: pd.DataFrame) -> dict[str, Any]:
    loops = counts.pivot_table(index="version", columns="kind", values="loop", aggfunc="sum", fill_value=0).sort_index()
    kinds = loops.sum().sort_values(ascending=False).index[:MOST_KINDS]
    rows = [{"version": version, "counts": [int(row[kind]) for kind in kinds]} for version, row in loops.iterrows()]
    svg = theme.inline_svg(figures.mix(data.mix(counts), ladders.titles()), f"mix-{gpu}", f"Instruction mix, {gpu}")
    return {"gpu": gpu, "svg": svg, "kinds": list(kinds), "rows": rows}


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
    svg = theme.inline_svg(figures.tuning(trials), f"study-{name}", f"Trials of {name}")
    pictures = optuna_pictures(trials)
    return {"name": name, "words": words, "svg": svg, "pictures": pictures, "large": len(trials) >= LARGE_STUDY}


def _experiment(name: str, rows: pd.DataFrame) -> dict[str, Any]:
    experiment, latest = EXPERIMENTS[name], experiment_figures.latest(rows)
    svg = theme.inline_svg(experiment_figures.DRAW[name](latest), name, experiment.title)
    source = experiment_figures.source(latest)
    return {"title": experiment.title, "text": experiment.text, "source": source, "svg": svg}


def _runs(results: Results) -> list[dict[str, Any]]:
    """The latest rows of all logs of runs, the newest first."""
    logs = (results.runs, results.bench, results.references, *(ladder.rows for ladder in results.ladders.values()))
    rows = pd.concat([frame for frame in logs if len(frame)] or [results.runs])
    newest = rows.sort_values("time", ascending=False, kind="stable").head(LATEST_RUNS)
    return [_run(row) for row in newest.itertuples()]


def _run(row: Any) -> dict[str, Any]:
    lengths = row.seqlen_q if row.seqlen_q == row.seqlen_k else f"{row.seqlen_q}x{row.seqlen_k}"
    more = (", causal" if row.causal else "") + (", no LSE" if row.lse is False else "")
    more += bounds(row.window_left, row.window_right, row.softcap)
    return {
        "time": row.time[:16].replace("T", " "),
        "kernel": f"{row.version} {tile(row.config)}".strip(),
        "config": row.config,
        "problem": f"{row.batch} x {row.num_heads} x {lengths} x {row.head_dim} {row.dtype}{more}",
        "device": row.device,
        "us": _number(row.time_us, ",.1f"),
        "tflops": rate(row.tflops) if pd.notna(row.tflops) else "",
        "ratio": _number(row.ratio, ".3f"),
        "verdict": row.verdict,
        "passed": row.passed is True,
    }


def _number(value: float | None, spelling: str) -> str:
    return format(value, spelling) if pd.notna(value) else ""
