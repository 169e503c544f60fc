"""Tables of results/references.csv, for the page of each reference and for the dashboard.

`flashladder bench` writes that log. It holds the references, timed beside rungs, and the rungs that take any attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd

from flashladder.common import catalog
from flashladder.common.catalog import Implementation
from flashladder.common.errors import ConfigError
from flashladder.common.measure import baselines
from flashladder.common.problem.config import Value, parse_values, spell
from flashladder.common.records.ladders import means
from flashladder.common.records.records import unbounded
from flashladder.common.records.slowdowns import remarks
from flashladder.common.report import formats
from flashladder.common.report.pages import documents
from flashladder.common.report.sections import Section
from flashladder.common.report.tables import numbers
from flashladder.common.report.templating import render

MARKER = "measured"


@dataclass(frozen=True)
class MeasuredTable:
    """What one run of the tool measured of one dtype, head_dim and mask."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    source: str
    log: str

    @property
    def markdown(self) -> str:
        """A Markdown table with its title and its source."""
        return render("measured.md.j2", table=self)


def tables(rows: pd.DataFrame, name: str) -> list[MeasuredTable]:
    """Of each device, dtype, head_dim and mask the latest run in which the implementation was timed.

    Rows without the log-sum-exp are left out, and those with a window or a softcap: they are of other work.
    """
    timed = rows[rows["ratio"].notna() & rows["lse"].ne(False) & unbounded(rows)]
    mine = timed[timed["version"] == name]
    found = []
    alike = ["dtype", "head_dim", "causal"]
    for (_, *kind), group in mine.groupby(["device", *alike], sort=False):
        run = group.sort_values("time", kind="stable")["run"].iloc[-1]
        found.append(table(timed[(timed["run"] == run) & (timed[alike] == kind).all(axis=1)], "references"))
    return found


def shown() -> list[Implementation]:
    """The implementations that have tables."""
    return [*catalog.references(), *(rung for rung in catalog.versions() if rung.supports.causal)]


def every_table(rows: pd.DataFrame) -> list[MeasuredTable]:
    """Those of all of them, each once."""
    return list(dict.fromkeys(table for implementation in shown() for table in tables(rows, implementation.name)))


def sections(rows: pd.DataFrame) -> list[Section]:
    """The tables on the pages that have a place for them: the references'."""
    found = {implementation.directory: tables(rows, implementation.name) for implementation in shown()}
    pages = [
        Section(directory / documents.PAGE, MARKER, partial(text, measured))
        for directory, measured in found.items()
        if measured
    ]
    return [page for page in pages if page.has_place]


def text(measured: Sequence[MeasuredTable]) -> str:
    """Tables one below the other."""
    return "\n\n".join(table.markdown for table in measured)


def tables_of_runs(rows: pd.DataFrame, log: str) -> list[MeasuredTable]:
    """Of each run, head_dim and mask, the latest first."""
    latest = rows.sort_values("time", ascending=False, kind="stable")["run"].unique()
    groups = dict(iter(rows.groupby(["run", "dtype", "head_dim", "causal"], sort=False)))
    kinds = sorted(groups, key=lambda kind: [*latest].index(kind[0]))
    return [table(groups[kind], f"{log}_{groups[kind]['gpu'].iloc[0]}") for kind in kinds]


def table(rows: pd.DataFrame, log: str) -> MeasuredTable:
    """What a run measured of one kind of problems, and the log that has the rows."""
    last = rows.iloc[-1]
    on_gpu = isinstance(last["driver"], str) and bool(last["driver"])
    unit, factor = (means(rows, None)["unit"], 1) if on_gpu else ("GFLOP/s", 1000)
    head, sizes, size_of = _sizes(rows)
    rows = rows.assign(size=size_of)
    lines = []
    for (version, config), group in rows.groupby(["version", "config"], sort=False):
        timed = {size: _cell(of_size, factor) for size, of_size in group.groupby("size", sort=False)}
        lines.append((_label(version, config), *(timed.get(size, "") for size in sizes), *_ratio(group)))
    mask = "causal" if last["causal"] else "full"
    official = _label(last["baseline"], "")
    title = f"{last['dtype']}, d{last['head_dim']}, {mask}: {unit}, and in brackets the time of {official} / its own"
    return MeasuredTable(title, (head, *numbers(*sizes, "mean", "95 %")), tuple(lines), _source(rows), log)


def _sizes(rows: pd.DataFrame) -> tuple[str, list[str], list[str]]:
    """What the columns are of, their heads in order, and that of each row: by length, or where Q is short by keys."""
    if rows["seqlen_q"].nunique() > 1 or rows["seqlen_q"].eq(rows["seqlen_k"]).all():
        name, pairs = "S", [(1, length) for length in rows["seqlen_q"]]
        of = {pair: str(pair[1]) for pair in pairs}
    else:
        name, pairs = "sequences x keys", [*zip(rows["batch"], rows["seqlen_k"], strict=True)]
        of = {pair: f"{pair[0]} x {pair[1]}" for pair in pairs}
    return name, [of[pair] for pair in sorted(of)], [of[pair] for pair in pairs]


def _cell(rows: pd.DataFrame, factor: int) -> str:
    """What one row comes to."""
    row, found = rows.iloc[0], means(rows, None)
    rate = formats.mean_rate(factor * found["rate"], found["unit"])
    return rate if row["version"] == row["baseline"] else f"{rate} ({row['ratio']:.2f})"


def _ratio(rows: pd.DataFrame) -> tuple[str, str]:
    if rows["version"].iloc[0] == rows["baseline"].iloc[0]:
        return "1", ""
    mean: dict[str, Any] = means(rows, None)
    return formats.bold(formats.ratio(mean["ratio"])), formats.interval(mean["ratio_low"], mean["ratio_high"])


def _label(version: str, config: str) -> str:
    """A kernel in words: a rung's number, a reference's or a baseline's name, and what is not its default."""
    if official := baselines.titles().get(version):
        return official
    try:
        implementation = catalog.find_implementation(version)
        changes = _changes(implementation, config)
    except ConfigError:  # what has another name or other fields by now, or whose row is damaged
        return f"{version} {config}".strip() or "unnamed"
    changed = [f"{name}={spell(value)}" for name, value in changes.items()]
    is_rung = isinstance(implementation, catalog.Version)
    return ", ".join([f"rung {catalog.address_of(version)}" if is_rung else version, *changed])


def _changes(implementation: Implementation, config: str) -> dict[str, Value]:
    values = parse_values(config)
    decided = {name: values[name] for name in ("dtype", "head_dim", "causal", "lse", "row_stride") if name in values}
    default = implementation.config(**decided)
    return {name: value for name, value in values.items() if getattr(default, name, None) != value}


def _source(rows: pd.DataFrame) -> str:
    """Where and when, and with what."""
    last = rows.iloc[-1]
    shape = f"{last['num_heads']} heads of {last['head_dim']}"
    if last["seqlen_q"] == last["seqlen_k"]:
        shape += f", batch x S = {last['batch'] * last['seqlen_q']}"
    toolkits = [toolkit for toolkit in rows["toolkit"].dropna().unique() if toolkit]
    compilers = [f"CUDA {toolkit}" if toolkit[0].isdigit() else toolkit for toolkit in toolkits]
    driver = [f"driver {last['driver']}"] if isinstance(last["driver"], str) and last["driver"] else []
    software = ", ".join([*driver, f"torch {last['torch']}", *compilers])
    cells = {"run": last["run"], "card": last["gpu_id"], "commit": last["commit"]}
    marks = ", ".join(f"{name} {cell}" for name, cell in cells.items() if isinstance(cell, str) and cell)
    where = f"{last['device']} ({marks}), {shape}; {software}; {last['time'][:10]}."
    return where + remarks(rows, "GPU" if driver else "CPU")
