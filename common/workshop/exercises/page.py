"""What a person reads of an exercise: the task beside the kernel, and the grade."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from flashladder.common import catalog
from flashladder.common.catalog import Version
from flashladder.common.errors import ResultsError
from flashladder.common.escape import Markdown
from flashladder.common.paths import ROOT
from flashladder.common.report import answer
from flashladder.common.report.sections import Section
from flashladder.common.report.tables import facts, folding, markdown, numbers, table
from flashladder.common.report.templating import render
from flashladder.common.workshop.exercises.exercise import Exercise, exercises
from flashladder.common.workshop.exercises.grading import GPU, Grade, grade
from flashladder.common.workshop.exercises.measures import MEASURES

KERNEL, TASK = "kernel.cu", "TASK.md"
LIST, MARKER = ROOT / "docs" / "learning.md", "exercises"  # the page that lists them, and where on it


def begin(exercise: Exercise, folder: Path) -> Grade:
    """Writes the start and the task into a new folder; gives the grade of the start.

    ResultsError where the folder holds a kernel already.
    """
    kernel = folder / KERNEL
    if kernel.exists():
        raise ResultsError(f"{kernel} is there already: grade it with --check, or name another folder with --folder")
    start = grade(exercise, exercise.start_kernel)
    exercise.lay_out(folder)
    (folder / TASK).write_text(_task(start))
    return start


def _task(start: Grade) -> str:
    values = {"exercise": start.exercise, "task": Markdown(start.exercise.task), "goal": goal(start), "kernel": KERNEL}
    return render("exercise.md.j2", **values, gpu=GPU, config=start.kernel.config.name) + "\n"


def goal(found: Grade) -> str:
    """The goal, in words."""
    exercise = found.exercise
    title = exercise.measure.title
    return (
        f"{title[0].upper()}{title[1:]}: {found.start[exercise.goal]:,} at the start, at most {found.bound:,} wanted."
    )


def verdict(found: Grade) -> Table:
    """Right or wrong, and how far the goal is."""
    own = f"{found.own[found.exercise.goal]:,}" if found.own else "it did not run to its end"
    return facts(
        f"Exercise {found.exercise.version.address}",
        {
            "right": _answer(not found.faults, "yes, and without a race", "\n".join(found.faults)),
            "goal": goal(found),
            "configuration": f"{found.kernel.config.name.replace(',', ', ')} (the rung's default)",
            "your kernel": _answer(found.reached, own, own),
            "grade": _answer(found.solved, "solved", "not solved yet"),
        },
    )


def judged(found: Grade) -> answer.Kernel:
    """The grade, for programs."""
    exercise = found.exercise
    goal = exercise.goal
    own: dict[str, Any] = {"own": found.own.get(goal), "reached": found.reached}
    return answer.Kernel(
        name=exercise.version.address,
        config=found.kernel.config.as_dict(),
        problem=exercise.problem.name,
        device="emulator",
        right=not found.faults,
        goal=answer.Goal(figure=exercise.measure.title, start=found.start[goal], bound=found.bound, **own),
        **answer.compiled(found.kernel),
    )


def faults(found: Grade) -> list[answer.Fault]:
    """What is wrong with the kernel, for programs."""
    of_outputs = found.faults[:-1] if found.error else found.faults
    said = [answer.Fault(kind="output", message=fault) for fault in of_outputs]
    return said + ([answer.fault_of(found.error)] if found.error else [])


def _answer(good: bool, yes: str, no: str) -> Text:
    return Text(yes, "green") if good else Text(no, "red")


def figures(found: Grade) -> Table:
    """All figures of the start, of the kernel and of the rung: an idea has its price too."""
    columns = [*folding("figure"), *numbers("start", "yours", f"rung {found.exercise.version.address}")]
    made = table("What it brings, and what it costs", columns)
    for name, measure in MEASURES.items():
        values = [figures.get(name) for figures in (found.start, found.own, found.rung)]
        style = "bold" if name == found.exercise.goal else ""
        made.add_row(measure.title, *("" if value is None else f"{value:,}" for value in values), style=style)
    return made


def overview(exercises: Iterable[Exercise]) -> Table:
    """The exercises, a line each."""
    rows = ((exercise.version.address, exercise.aim, len(exercise.hints)) for exercise in exercises)
    return table("Exercises", ["rung", *folding("what to do"), *numbers("hints")], rows)


def section() -> Section:
    """The same as a part of a page, and of the rungs that say so why they have none."""
    return Section(LIST, MARKER, lambda: "\n\n".join(_lists()))


def _lists() -> Iterator[str]:
    found = [each for each in exercises() if each.version.home is None]
    yield markdown(["exercise", "what to do"], ([Markdown(f"`{each.version.address}`"), each.aim] for each in found))
    yield "Some rungs have none:"
    without = (each for each in catalog.select(catalog.ladders()) if each.home is None and each.no_exercise)
    yield markdown(["rung", "why"], ([_linked(version), Markdown(version.no_exercise)] for version in without))


def _linked(version: Version) -> Markdown:
    return Markdown(f"[{version.address}]({os.path.relpath(version.directory, LIST.parent)}/README.md)")
