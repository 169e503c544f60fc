"""What a rung's page has in the book besides: the step in code, the loop in machine code, a chart of its speed."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pandas as pd

from flashladder.common.book import code, speed
from flashladder.common.catalog import Version
from flashladder.common.escape import Markdown
from flashladder.common.paths import PUBLISHED
from flashladder.common.problem.config import listing
from flashladder.common.report import neighbours
from flashladder.common.report.tables import markdown, numbers
from flashladder.common.report.templating import render
from flashladder.common.workshop.exercises.exercise import Exercise

COUNTED = "h100"  # for which GPU the rungs' instructions are counted in results/
MOST = 14  # kinds of instructions in a table


def further(version: Version, fragment: str) -> tuple[str, dict[str, Callable[[], str]]]:
    """A rung's further parts in Markdown, and the HTML of the places in them that `fragment` marks."""
    parts, made = [], {}
    for name, title, part in (("step", "The step in code", _step), ("speed", "Its speed", speed.chart)):
        if words_and_html := part(version):
            words, made[name] = words_and_html
            parts += [f"## {title}", words, fragment.format(name)]
        if name == "step" and (loop := _loop(version)):
            parts += ["## The loop in machine code", loop]
    if version.no_exercise:
        parts += ["## No exercise", version.no_exercise]
    return "\n\n".join(["", *parts]), made


def task(exercise: Exercise) -> str:
    """The page of an exercise."""
    return render("book_exercise.md.j2", exercise=exercise, task=Markdown(exercise.task), hints=exercise.own_hints)


def _step(version: Version) -> tuple[str, Callable[[], str]]:
    found = next(iter(neighbours.steps([version])), None)
    if found is None:
        words = f"It is the first rung of its ladder. All of {_link(version.kernel, version)}:"
        return words, lambda: code.listing(version.kernel)
    below, directory = found.below, version.directory
    words = (
        f"{_link(version.kernel, version)} beside that of [{below.number} {below.title}]"
        f"({os.path.relpath(below.directory, directory)}/README.md). Without comments and empty lines, "
        f"{found.added} lines are new and {found.removed} are gone."
    )
    known = {path.name: path for path in neighbours.headers(version.kernel)}
    new = [known[name] for name in found.headers]
    if new:
        words += (
            f" Headers that no lower rung includes: {listing(_link(header, version) for header in new)}, folded below."
        )
    titles = (f"{below.address} {below.title}", f"{version.address} {version.title}")
    return words, lambda: code.beside(below.kernel, version.kernel, titles) + "".join(map(code.folded, new))


def _link(path: Path, version: Version) -> str:
    return f"[`{path.name}`]({os.path.relpath(path, version.directory)})"


def _loop(version: Version) -> str:
    """How often each kind of instruction is in the main loop, here and in the rung below, where that differs."""
    rows = _counts()
    lower = version.below()
    ours = rows[rows["version"] == version.name]
    theirs = rows[rows["version"] == (lower.name if lower else "")]
    if not ours["loop"].sum():
        return ""
    both = pd.DataFrame({"below": theirs.groupby("kind")["loop"].sum(), "here": ours.groupby("kind")["loop"].sum()})
    both = both.fillna(0).astype(int)
    total = both.sum()
    both["more"] = both["here"] - both["below"]
    changed = both[both["here"] > 0] if theirs.empty else both[both["more"] != 0]
    shown = changed.reindex(changed["more"].abs().sort_values(ascending=False, kind="stable").index)[:MOST]
    if theirs.empty:
        columns = ["instruction", *numbers("in the loop")]
        cells = [(kind, row.here) for kind, row in shown.iterrows()]
        made = markdown(columns, [*cells, ("all", total["here"])])
    else:
        columns = ["instruction", *numbers("rung below", "this rung", "more")]
        changes = [(kind, row.below, row.here, f"{row.more:+}") for kind, row in shown.iterrows()]
        made = markdown(columns, [*changes, ("all", *total, f"{total['here'] - total['below']:+}")])
    words = _configurations(theirs, ours)
    return f"{words}\n\n{made}" if len(shown) else f"{words} The rung below has the same: {total['here']}."


def _configurations(theirs: pd.DataFrame, ours: pd.DataFrame) -> str:
    own, lower = (each["config"].iloc[0].replace(",", ", ") if len(each) else "" for each in (ours, theirs))
    said = f"Instructions in one turn of the main loop, as compiled for an H100 ({ours['arch'].iloc[0]}): `{own}`"
    return f"{said}; the rung below: `{lower}`." if lower and lower != own else f"{said}."


@cache
def _counts() -> pd.DataFrame:
    return pd.read_csv(PUBLISHED / f"sass_{COUNTED}.csv.gz", keep_default_na=False)
